"""An object store in a bucket of anything that speaks S3 (boto3, loaded when a store is opened).

Goes in: keys and bytes; comes out: objects below ``s3://bucket/prefix``. Create-only puts are ``If-None-Match: *``; a
store that ignores the header is found by ``probe``. Credentials come from boto3's own chain (environment, profile,
instance role) and are never kept here.
"""

import importlib
import io
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from headrace.connectors.stores.store import (
    AlreadyExists,
    NoSuchKey,
    ObjectInfo,
    StoreRefused,
    StoreUnavailable,
    check_key,
    check_prefix,
    is_key,
)

__all__ = ("S3Store",)

_MULTIPART_ABOVE = 64 << 20
_CONFLICT_TRIES = 8


class S3Store:
    """Objects in ``bucket`` below ``prefix``.

    endpoint_url: another server than AWS. path_style: bucket in the path instead of the host name (every non-AWS
    server understands it). timeout: seconds to wait for an answer, and at most 10 of them to connect. attempts: tries
    by boto3's own retry, with pauses of up to 20 s between, before StoreUnavailable. connections: the most in flight
    at once. Raises StoreRefused when boto3 is missing.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        path_style: bool = True,
        timeout: float = 20.0,
        attempts: int = 4,
        connections: int = 32,
    ) -> None:
        try:
            boto3 = importlib.import_module("boto3")
            config = importlib.import_module("botocore.config")
        except ImportError as error:
            raise StoreRefused("an s3:// store needs boto3: pip install 'headrace[s3]'") from error
        self._errors = importlib.import_module("botocore.exceptions")
        self._bucket = bucket
        self._attempts = max(1, attempts)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        if self._prefix:
            check_prefix(self._prefix)
        settings = config.Config(
            connect_timeout=min(timeout, 10.0),
            read_timeout=timeout,
            max_pool_connections=connections,
            tcp_keepalive=True,
            retries={"mode": "standard", "total_max_attempts": attempts},
            s3={"addressing_style": "path" if path_style else "auto"},
            # The default adds a CRC of its own to every body: twice the CPU, and some servers refuse the trailer.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        try:
            session = boto3.session.Session()
            self._client: Any = session.client("s3", endpoint_url=endpoint_url, region_name=region, config=settings)
            self._client.meta.events.register("before-call.s3.HeadBucket", _sent_on_once)
        except (ValueError, self._errors.BotoCoreError) as error:
            raise StoreRefused(
                f"{self.url} cannot be opened: {error}; check [store] and the AWS_* variables"
            ) from error

    @property
    def url(self) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def put(self, key: str, data: bytes | bytearray | memoryview, *, create_only: bool = False) -> None:
        """Write a whole object (see ``ObjectStore.put``); above 64 MB in parts unless create-only."""
        name = self._name(key)
        body = bytes(data) if not isinstance(data, bytes) else data
        if len(body) > _MULTIPART_ABOVE and not create_only:
            self._put_parts(name, body)
            return
        condition = {"IfNoneMatch": "*"} if create_only else {}
        for attempt in range(_CONFLICT_TRIES):
            try:
                self._client.put_object(Bucket=self._bucket, Key=name, Body=body, **condition)
                return
            except self._errors.ClientError as error:
                # 409 says that another conditional put of the key was in flight: the answer is in the next try.
                if _status(error) != 409 or attempt == _CONFLICT_TRIES - 1:
                    self._raise(error, key, "write")
            except self._errors.BotoCoreError as error:
                self._raise(error, key, "write")

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Bytes of an object (see ``ObjectStore.get``)."""
        wanted: dict[str, str] = {}
        if start or end is not None:
            first = start or 0
            if end is not None and end <= first:
                self.head(key)
                return b""
            wanted["Range"] = f"bytes={first}-" if end is None else f"bytes={first}-{end - 1}"
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key), **wanted)
            except self._errors.ClientError as error:
                if _status(error) == 416:
                    return b""
                self._raise(error, key, "read")
            except self._errors.BotoCoreError as error:
                self._raise(error, key, "read")
            try:
                body: bytes = answer["Body"].read()
                return body
            except (self._errors.BotoCoreError, OSError) as error:
                # boto3 repeats requests, and not the reading of what they brought.
                if attempt >= self._attempts:
                    self._raise(error, key, "read")
                time.sleep(min(0.1 * 2**attempt, 5.0))

    def head(self, key: str) -> ObjectInfo:
        """Size and time of an object (see ``ObjectStore.head``)."""
        try:
            answer = self._client.head_object(Bucket=self._bucket, Key=self._name(key))
        except (self._errors.ClientError, self._errors.BotoCoreError) as error:
            self._raise(error, key, "look up")
        return ObjectInfo(key, int(answer["ContentLength"]), answer["LastModified"].timestamp())

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects by prefix in the order of their keys (see ``ObjectStore.list``); a request per 1,000."""
        wanted = {"StartAfter": self._prefix + start_after} if start_after else {}
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + check_prefix(prefix), **wanted
        )
        try:
            for page in pages:
                for entry in page.get("Contents", ()):
                    key = entry["Key"].removeprefix(self._prefix)
                    if is_key(key):
                        yield ObjectInfo(key, int(entry["Size"]), entry["LastModified"].timestamp())
        except (self._errors.ClientError, self._errors.BotoCoreError) as error:
            self._raise(error, prefix, "list")

    def delete(self, key: str) -> None:
        """Remove an object (see ``ObjectStore.delete``)."""
        try:
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))
        except (self._errors.ClientError, self._errors.BotoCoreError) as error:
            self._raise(error, key, "delete")

    def sweep_unfinished(self, prefix: str, before: float) -> int:
        """Abort old multipart uploads (see ``ObjectStore.sweep_unfinished``); none where the store keeps no list."""
        swept = 0
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=self._prefix + check_prefix(prefix)
        )
        try:
            for page in pages:
                for upload in page.get("Uploads", ()):
                    if upload["Initiated"].timestamp() < before:
                        self._client.abort_multipart_upload(
                            Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                        swept += 1
        except self._errors.ClientError as error:
            if _status(error) not in (404, 501) or _code(error) == "NoSuchBucket":
                self._raise(error, prefix, "abort uploads under")
        except self._errors.BotoCoreError as error:
            self._raise(error, prefix, "abort uploads under")
        return swept

    def create_bucket(self) -> None:
        """Make the bucket if it is missing (test servers and fresh deployments)."""
        try:
            self._client.create_bucket(Bucket=self._bucket)
        except self._errors.ClientError as error:
            if _code(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                self._raise(error, self._bucket, "create bucket")
        except self._errors.BotoCoreError as error:
            self._raise(error, self._bucket, "create bucket")

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _put_parts(self, name: str, body: bytes) -> None:
        transfer = importlib.import_module("boto3.s3.transfer")
        failed = importlib.import_module("boto3.exceptions").Boto3Error
        setting = transfer.TransferConfig(multipart_threshold=_MULTIPART_ABOVE, multipart_chunksize=16 << 20)
        try:
            self._client.upload_fileobj(io.BytesIO(body), self._bucket, name, Config=setting)
        except (failed, self._errors.ClientError, self._errors.BotoCoreError) as error:
            self._raise(error, name, "write")

    def _raise(self, error: Exception, key: str, verb: str) -> NoReturn:
        """Say a boto3 error in the terms of ``ObjectStore``."""
        where = f"{self.url}: cannot {verb} {key}"
        if not isinstance(error, self._errors.ClientError):
            if isinstance(error, (self._errors.NoCredentialsError, self._errors.PartialCredentialsError)):
                raise StoreRefused(
                    f"{where}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                ) from error
            if isinstance(error, self._errors.ParamValidationError):
                raise StoreRefused(f"{where}: {error}; change [store] url") from error
            if isinstance(error, self._errors.SSLError) and "WRONG_VERSION_NUMBER" in str(error):
                raise StoreRefused(f"{where}: the server speaks http, not https; change endpoint_url") from error
            raise StoreUnavailable(f"{where}: {error}") from error
        code, status = _code(error), _status(error)
        if code == "NoSuchBucket":
            raise StoreRefused(
                f"{where}: bucket {self._bucket} does not exist; create it or change [store] url"
            ) from error
        if status == 404:
            raise NoSuchKey(f"{self.url}: no object {key}") from error
        if status == 412:
            raise AlreadyExists(f"{self.url}: object {key} exists; a create-only put lost") from error
        if 301 <= status <= 308:
            raise StoreRefused(
                f"{where}: the server sends requests elsewhere ({status}); check endpoint_url (https instead of http?) "
                "and region"
            ) from error
        if code == "RequestTimeTooSkewed":
            raise StoreRefused(f"{where}: {code}; set this machine's clock") from error
        later = status in (408, 409, 429) or (status >= 500 and status != 501)
        if later or code in ("SlowDown", "RequestTimeout", "Throttling"):
            raise StoreUnavailable(f"{where}: {code} ({status})") from error
        raise StoreRefused(f"{where}: {code} ({status}); check credentials, bucket policy and endpoint") from error


def _sent_on_once(context: dict[str, Any], **_: object) -> None:
    """Keep botocore from asking where the bucket lies in order to learn where the bucket lies, again and again.

    A server that answers everything with a redirect (to https, say) would have it ask until the stack ends.
    """
    context.setdefault("s3_redirect", {})["redirected"] = True


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
