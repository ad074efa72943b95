"""`quantkit doctor`."""

import typer

from quantkit.console import print_json, print_table


def doctor(
    json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
    kernels: bool = typer.Option(
        False, "--kernels", help="Compile and self-test every CUDA kernel on this machine's card; takes minutes."
    ),
) -> int:
    """Say what is installed, which backend will be used and why. Exits 3 when something essential is absent, or a
    kernel is wrong."""
    if kernels:
        return _check_kernels(json)
    from quantkit.commands.doctor import run

    report = run()
    if json:
        print_json(report.as_json())
    else:
        print_table("quantkit doctor", ["", "found", "remark"], report.rows())
    return 0 if report.healthy else 3


def _check_kernels(json: bool) -> int:
    from quantkit.commands.kernel_check import run

    report = run()
    if json:
        print_json(report.as_json())
    else:
        print_table(f"CUDA kernels on {report.card}", ["kernel", "cases", "largest error", "result"], report.rows())
    return 0 if report.healthy else 3
