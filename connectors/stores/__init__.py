"""Object stores with create-only writes: S3 (boto3) and a local directory with the same semantics."""
