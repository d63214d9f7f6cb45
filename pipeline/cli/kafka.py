"""``headrace kafka``: Apache Kafka on this machine without a container engine; rights and logins of a run's roles.

``up``, ``down`` and ``status`` keep one or three nodes in a state folder; they outlive the command. ``acls`` and
``users`` (``kafka_access``) work on any cluster.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.pipeline.cli import kafka_access
from headrace.pipeline.cli.arguments import Format, Output, command_group, print_json, print_table
from headrace.schemas.errors import EXIT_FAILURE, ConfigurationError

if TYPE_CHECKING:
    from headrace.connectors.kafka_cluster import Cluster, Plan

__all__ = ("app",)

app = command_group("Apache Kafka on this machine, and the rights of a run's roles on any cluster.")
app.command("acls")(kafka_access.acls)
app.command("users")(kafka_access.users)

FolderOption = Annotated[
    str, typer.Option("--folder", help="State folder; without it headrace/kafka in the user's state folder.")
]


@app.command()
def up(
    nodes: Annotated[int | None, typer.Option(help="Nodes: 1 (default), or 3 to see replication and failover.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the first node on 127.0.0.1 (default 9092); others take the next.")
    ] = None,
    secure: Annotated[bool | None, typer.Option("--secure", help="TLS, SCRAM logins for every role, and ACLs.")] = None,
    libs: Annotated[
        str, typer.Option(help="The libs folder of an unpacked Kafka 4; else HEADRACE_KAFKA_LIBS, else by Maven.")
    ] = "",
    heap: Annotated[str, typer.Option(help="Memory of each node's Java heap.")] = "512m",
    folder: FolderOption = "",
    output: Output = Format.text,
) -> None:
    """Start what does not run of a cluster, wait until it answers, and say how to use it. Needs Java 17.

    Of a cluster that exists, what is not given is as it was.
    """
    from headrace.connectors.kafka_cluster import Plan
    from headrace.connectors.kafka_jars import find_java, find_libs
    from headrace.schemas.access import ROLES

    if nodes not in (None, 1, 3):
        raise ConfigurationError(f"--nodes {nodes}: take 1, or 3, the least that goes on when one is lost")
    cluster = _cluster(folder)
    have = cluster.plan() or Plan()
    safe = have.secure if secure is None else secure
    users = tuple(ROLES) if safe else ()
    plan = Plan(nodes=nodes or have.nodes, port=port or have.port, secure=safe, users=users)
    java = find_java()
    jars = find_libs(Path(libs) if libs else None, say=lambda text: print(text, file=sys.stderr))
    started = cluster.up(plan, java, jars, heap=heap)
    about = _about(cluster, plan)
    if output is Format.json:
        print_json({"started": started, **about})
        return
    said = f"started node {', '.join(map(str, started))}" if started else "runs already"
    sys.stdout.write(f"Apache Kafka at {about['bootstrap']}: {said}; state in {cluster.folder}\n")
    sys.stdout.write(_advice(cluster, plan, str(about["bootstrap"])))


@app.command()
def down(
    delete: Annotated[bool, typer.Option("--delete", help="Forget data and logins too. There is no way back.")] = False,
    folder: FolderOption = "",
    output: Output = Format.text,
) -> None:
    """End the cluster's nodes; the data stays for the next `up`."""
    cluster = _cluster(folder)
    ended = cluster.down(delete=delete)
    if output is Format.json:
        print_json({"ended": ended, "deleted": delete})
        return
    said = f"ended node {', '.join(map(str, ended))}" if ended else "nothing ran"
    gone = f"; data and logins in {cluster.folder} are gone" if delete else ""
    sys.stdout.write(f"{said}{gone}\n")


@app.command()
def status(folder: FolderOption = "", output: Output = Format.text) -> None:
    """Nodes with address, pid and log. Exit codes: 0 all run, 1 some do not, 78 there is no cluster."""
    cluster = _cluster(folder)
    states = cluster.status()
    rows = [(s.number, s.address, s.pid or "-", s.log) for s in states]
    if output is Format.json:
        keys = ("node", "address", "pid", "log")
        plan = cluster.plan()
        print_json(
            {
                "running": all(s.pid for s in states),
                "secure": bool(plan and plan.secure),
                "nodes": [dict(zip(keys, (s.number, s.address, s.pid or None, s.log), strict=True)) for s in states],
            }
        )
    else:
        print_table(("node", "address", "pid", "log"), rows)
    if not all(s.pid for s in states):
        raise typer.Exit(EXIT_FAILURE)


def _cluster(folder: str) -> "Cluster":
    from headrace.connectors.kafka_cluster import Cluster, default_folder

    return Cluster(Path(folder) if folder else default_folder())


def _about(cluster: "Cluster", plan: "Plan") -> dict[str, object]:
    about: dict[str, object] = {
        "bootstrap": cluster.bootstrap(),
        "nodes": plan.nodes,
        "secure": plan.secure,
        "folder": str(cluster.folder),
    }
    if plan.secure:
        about |= {"certificate": str(cluster.certificate), "secrets": str(cluster.secrets)}
    return about


def _advice(cluster: "Cluster", plan: "Plan", bootstrap: str) -> str:
    copies = "" if plan.nodes == 1 else " kafka.replication_factor=3"
    lines = [f"  headrace run @ FILE kafka.bootstrap={bootstrap}{copies}"]
    if plan.secure:
        from headrace.connectors.kafka_properties import MECHANISM

        lines[0] += " \\"
        lines += [
            f"      kafka.security_protocol=SASL_SSL kafka.sasl_mechanism={MECHANISM} \\",
            f"      kafka.ssl_ca_location={cluster.certificate} \\",
            f"      'kafka.sasl_username={{role}}' 'kafka.sasl_password_file={cluster.secrets}/{{role}}.password'",
            "users: admin and one for each role, with passwords in that folder; give them their rights by",
            f"  headrace kafka acls --run ID --bootstrap {bootstrap} --state {cluster.folder} --apply",
        ]
    return "\n".join([*lines, ""])
