"""``headrace kafka acls|users``: the least rights of a run's roles, worked out from the map of topics; their logins.

Both print what they would do, or with ``--apply`` do it, on a cluster that an administrator's login opens: the one of
``headrace kafka up --secure`` (``--state``), or the one that the [kafka] section of a file names (``--config``).
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli.arguments import Format, Output, print_json
from headrace.schemas.access import ROLES, grants_of
from headrace.schemas.errors import ConfigurationError

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

__all__ = ("acls", "users")

PrincipalOption = Annotated[
    list[str], typer.Option("--principal", help="ROLE=NAME: the user of a role, where it is not called like the role.")
]
ApplyOption = Annotated[bool, typer.Option("--apply", help="Do it, instead of printing it.")]
BootstrapOption = Annotated[str, typer.Option(help="HOST:PORT of the cluster, over the configured one.")]
StateOption = Annotated[str, typer.Option(help="State folder of `headrace kafka up --secure`, whose admin does it.")]
ConfigOption = Annotated[str, typer.Option(help="TOML file whose [kafka] section has an administrator's login.")]


def acls(
    run: Annotated[str, typer.Option("--run", help="Id of the run; topics, groups and ids begin with it.")],
    principal: PrincipalOption = [],  # noqa: B006 # typer's way to say "may be repeated"
    apply: ApplyOption = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take these rights away.")] = False,
    bootstrap: BootstrapOption = "",
    state: StateOption = "",
    config: ConfigOption = "",
    output: Output = Format.text,
) -> None:
    """Least rights of every role of a run: as arguments of kafka-acls.sh, or applied to a cluster."""
    if apply and remove:
        raise ConfigurationError("--apply gives rights and --remove takes them away: name one of them")
    names, grants = _principals(principal), grants_of(run)
    if not (apply or remove):
        _show(names, run, output)
        return
    from headrace.connectors.kafka_acls import apply_grants, remove_grants

    admin, where = _administrator(bootstrap, state, config)
    count = (apply_grants if apply else remove_grants)(admin, grants, names, where)
    if output is Format.json:
        print_json({"run": run, "applied" if apply else "removed": count})
    else:
        sys.stdout.write(f"{'gave' if apply else 'took away'} {count} rights of run {run} at {where}\n")


def users(
    secrets: Annotated[str, typer.Option(help="Folder for ROLE.password files; made where they are missing.")],
    principal: PrincipalOption = [],  # noqa: B006
    apply: ApplyOption = False,
    bootstrap: BootstrapOption = "",
    state: StateOption = "",
    config: ConfigOption = "",
) -> None:
    """Logins (SCRAM-SHA-512) of every role, with passwords in files that only their owner can read."""
    names = _principals(principal)
    if not apply:
        sys.stdout.write("".join(f"{name}: password in {secrets}/{role}.password\n" for role, name in names.items()))
        return
    from headrace.connectors.kafka_acls import ensure_users

    admin, where = _administrator(bootstrap, state, config)
    files = ensure_users(admin, names, Path(secrets), where)
    sys.stdout.write(f"gave {len(files)} logins at {where}; passwords are in {secrets}\n")


def _principals(given: list[str]) -> dict[str, str]:
    names = {role: role for role in ROLES}
    for text in given:
        role, equals, name = text.partition("=")
        if not equals or not name or role not in ROLES:
            raise ConfigurationError(f"--principal {text}: write ROLE=NAME with one of {', '.join(ROLES)}")
        names[role] = name
    return names


def _show(names: dict[str, str], run: str, output: Format) -> None:
    from dataclasses import asdict

    from headrace.connectors.kafka_acls import command_lines

    grants = grants_of(run)
    if output is Format.json:
        print_json([{**asdict(grant), "principal": f"User:{names[grant.role]}"} for grant in grants])
        return
    sys.stdout.write("".join(f"{line}\n" for line in command_lines(grants, names)))


def _administrator(bootstrap: str, state: str, config: str) -> "tuple[AdminClient, str]":
    """An admin client and the address it talks to. Raises ConfigurationError when no login is named."""
    from headrace.connectors.kafka import Connection
    from headrace.connectors.kafka_cluster import Cluster
    from headrace.schemas.config import KafkaConfig, read_kafka_section

    if bool(state) == bool(config):
        raise ConfigurationError(
            "whose login? --state FOLDER takes the admin of `headrace kafka up --secure`, --config FILE the one that "
            "the file's [kafka] section names"
        )
    section = read_kafka_section(config) if config else KafkaConfig.model_validate(Cluster(Path(state)).login())
    connection = Connection.of(section, "admin", bootstrap or None)
    connection.wait_for_broker(10.0)
    return connection.admin(), connection.bootstrap
