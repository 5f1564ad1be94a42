"""`swarm config`: shows the resolved configuration, or every setting."""

import json

import typer

from swarm.cli.arguments import CONFIG_HELP, CONFIG_METAVAR, given_layers
from swarm.cli.node.run import OVERRIDES

app = typer.Typer(help="Show the resolved configuration, or list every setting.", no_args_is_help=True)


@app.command("show", context_settings=OVERRIDES)
def show(
    config: list[str] = typer.Argument(None, metavar=CONFIG_METAVAR, help=CONFIG_HELP),
) -> None:
    """Print the resolved configuration as TOML, with the origin of each value.

    Reads: CONFIG, variables SWARM_SECTION__KEY.
    Writes: nothing.

    Examples:
      swarm config show node_configs/gpu-8gb.toml node_configs/public.toml

    Exit codes: 0 done, 3 configuration.
    """
    from swarm.config import dump_toml, origin_in, resolve

    layers = given_layers(config or [])
    print(dump_toml(resolve(layers), origin_in(layers)), end="")


@app.command("schema")
def schema(
    as_json: bool = typer.Option(False, "--json", help="Print JSON schema, for editors."),
    as_markdown: bool = typer.Option(False, "--markdown", help="Print the reference page of the documentation."),
) -> None:
    """List every setting with type, default and meaning.

    Reads: nothing.
    Writes: nothing.

    Examples:
      swarm config schema
      swarm config schema --markdown > docs/configuration.md

    Exit codes: 0 done.
    """
    from swarm.config import Config
    from swarm.config.reference import reference_markdown, settings

    if as_json:
        print(json.dumps(Config.model_json_schema(), indent=2))
    elif as_markdown:
        print(reference_markdown(), end="")
    else:
        _print_table(settings())


def _print_table(rows: list[tuple[str, str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "type", "default", "meaning", show_lines=False)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    Console().print(table)
