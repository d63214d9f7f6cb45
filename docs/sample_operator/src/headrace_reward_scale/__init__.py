"""The operator reward_scale for headrace."""
