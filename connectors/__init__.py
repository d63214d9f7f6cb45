"""Outside systems, one file each behind a small Protocol: Kafka, the local broker, object stores, engines, datasets."""
