"""The parts of a rollout worker, from its inbox to its deliveries; ``task_to_trajectory`` joins them."""
