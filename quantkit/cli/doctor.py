"""`quantkit doctor`."""

import typer

from quantkit.console import print_json, print_table


def doctor(json: bool = typer.Option(False, "--json", help="One JSON object on stdout.")) -> int:
    """Say what is installed, which backend will be used and why. Exits 3 when something essential is absent."""
    from quantkit.commands.doctor import run

    report = run()
    if json:
        print_json(report.as_json())
    else:
        print_table("quantkit doctor", ["", "found", "remark"], report.rows())
    return 0 if report.healthy else 3
