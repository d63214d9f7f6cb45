"""The local broker: a small single-node server of the Kafka protocol for laptops, tests and the quickstart."""
