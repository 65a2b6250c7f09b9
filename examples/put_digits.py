"""Puts the handwritten digits into an S3 server on this machine, where the TrainingJobs of the examples read them."""

from __future__ import annotations

import io

import boto3
import numpy as np
from botocore.config import Config
from sklearn.datasets import load_digits

ENDPOINT = "http://127.0.0.1:9000"
KEYS = {"aws_access_key_id": "demo", "aws_secret_access_key": "demo-secret", "region_name": "us-east-1"}


def digits() -> bytes:
    """Return digits.npz: pictures of 64 numbers from 0 to 16, and labels."""
    found = load_digits()
    body = io.BytesIO()
    np.savez(body, pictures=found.images.reshape(-1, 64).astype(np.uint8), labels=found.target.astype(np.uint8))
    return body.getvalue()


def main() -> None:
    """Make both buckets of the examples, and put the digits into one of them."""
    patient = Config(retries={"mode": "standard", "total_max_attempts": 10})  # the server may be starting
    client = boto3.client("s3", endpoint_url=ENDPOINT, config=patient, **KEYS)
    for bucket in ("datasets", "models"):
        client.create_bucket(Bucket=bucket)
    client.put_object(Bucket="datasets", Key="digits/digits.npz", Body=digits())


if __name__ == "__main__":
    main()
