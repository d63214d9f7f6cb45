"""What travels: records, their Avro schemas and wire form, the map of topics, the delta layout, the configuration."""
