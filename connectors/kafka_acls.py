"""Rights and logins on a cluster: grants as Kafka's ACL bindings, SCRAM users with their passwords in files.

In: the grants of ``schemas.access``, an admin client, names of principals. Out: what the cluster now allows. Applying
twice changes nothing, and removing takes away only what would be applied.
"""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.admin._scram import (
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)

from headrace.connectors.kafka_admin import REQUEST_SECONDS, answer_of
from headrace.connectors.kafka_errors import explain
from headrace.connectors.kafka_properties import MECHANISM
from headrace.connectors.kafka_secrets import password_file, write_secret
from headrace.schemas.access import Grant

__all__ = ("apply_grants", "command_lines", "ensure_users", "remove_grants")

_ITERATIONS = 4096
_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional_id": ResourceType.TRANSACTIONAL_ID,
}


def apply_grants(admin: AdminClient, grants: Sequence[Grant], principals: Mapping[str, str], where: str) -> int:
    """Allow what ``grants`` say to ``principals[role]`` from any host; returns how many rights stand there for it.

    Raises KafkaFailure or LoginRefused, naming the cluster at ``where``.
    """
    bindings = [_binding(grant, principals[grant.role]) for grant in grants]
    try:
        for future in admin.create_acls(bindings, request_timeout=REQUEST_SECONDS).values():
            answer_of(future)
    except KafkaException as error:
        raise explain(error, "giving rights", where) from error
    return len(bindings)


def remove_grants(admin: AdminClient, grants: Sequence[Grant], principals: Mapping[str, str], where: str) -> int:
    """Take these rights away; returns how many there were. Raises KafkaFailure or LoginRefused."""
    filters = [_filter(_binding(grant, principals[grant.role])) for grant in grants]
    try:
        futures = admin.delete_acls(filters, request_timeout=REQUEST_SECONDS)
        return sum(len(answer_of(future)) for future in futures.values())
    except KafkaException as error:
        raise explain(error, "taking rights away", where) from error


def ensure_users(admin: AdminClient, users: Mapping[str, str], folder: Path, where: str) -> list[Path]:
    """Give each role's user (``users[role]``) the password in ``folder/ROLE.password``, made where it is missing.

    Returns the files. Raises KafkaFailure or LoginRefused.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mechanism = ScramMechanism.SCRAM_SHA_512 if MECHANISM.endswith("512") else ScramMechanism.SCRAM_SHA_256
    changes: list[UserScramCredentialAlteration] = []
    files = []
    for role, user in users.items():
        file = password_file(folder, role)
        if not file.exists():
            write_secret(file, secrets.token_urlsafe(24))
        password = file.read_text("utf-8").strip().encode()
        changes.append(UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, _ITERATIONS), password))
        files.append(file)
    try:
        for future in admin.alter_user_scram_credentials(changes, request_timeout=REQUEST_SECONDS).values():
            answer_of(future)
    except KafkaException as error:
        raise explain(error, "giving logins", where) from error
    return files


def command_lines(grants: Sequence[Grant], principals: Mapping[str, str]) -> list[str]:
    """The same rights as arguments of Kafka's own ``kafka-acls.sh``, one line for each."""
    return [
        f"--add --allow-principal User:{principals[grant.role]} --operation {_camel(grant.operation)} "
        f"--{grant.resource.replace('_', '-')} {grant.name}"
        + (" --resource-pattern-type prefixed" if grant.prefixed else "")
        for grant in grants
    ]


def _camel(operation: str) -> str:
    return "".join(word.capitalize() for word in operation.split("_"))


def _binding(grant: Grant, principal: str) -> AclBinding:
    return AclBinding(
        _RESOURCES[grant.resource],
        grant.name,
        ResourcePatternType.PREFIXED if grant.prefixed else ResourcePatternType.LITERAL,
        f"User:{principal}",
        "*",
        AclOperation[grant.operation],
        AclPermissionType.ALLOW,
    )


def _filter(binding: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        binding.restype, binding.name, binding.resource_pattern_type, binding.principal, binding.host,
        binding.operation, binding.permission_type,
    )  # fmt: skip
