"""The stream runtime: a worker runs one sub-topology as tasks with stores, timers and Kafka transactions."""
