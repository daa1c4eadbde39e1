"""The command line. Commands import what they need when they run, so that `--help` is quick.

Exit codes: 0 done, 1 a fault of ours (or a check that failed), 2 usage, 3 nothing fits, 4 stale plan, 5 model not supported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from autoplan.errors import AutoplanError

app = typer.Typer(
    name="autoplan",
    help="Chooses how to divide a PyTorch model over many devices, says why, and runs it so.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="a preset (`autoplan models`), hf:PATH_OR_ID, or FILE_OR_MODULE:FACTORY")]
ClusterOption = Annotated[str, typer.Option("--cluster", "-c", help="DEVICE:NODESxPER_NODE (`autoplan clusters`), a YAML file, or detect:RANKS (here)")]
GlobalBatch = Annotated[int | None, typer.Option("--global-batch", "-b", help="rows of the global batch", show_default="32, or one a device")]
Seq = Annotated[int | None, typer.Option("--seq", "-s", help="tokens a row", show_default="the model's own")]
Precision = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16", show_default="bf16 on GPUs, fp32 on CPUs")]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="write here instead")]


def fixed(what: str) -> Any:
    """An option that fixes a part of the plan."""
    return typer.Option(help=what, rich_help_panel="Constraints (left out: searched)", show_default=False)


@app.callback()
def common(debug: Annotated[bool, typer.Option("--debug", help="show the trace-back of an error; may stand anywhere")] = False) -> None:
    pass


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="processes on this machine")] = 4,
    steps: Annotated[int, typer.Option(help="training steps")] = 30,
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for the plan, the report and the traces")] = Path("autoplan-demo"),
) -> None:
    """Measure this machine, plan, train a small Llama under the plan and alone, and compare."""
    from autoplan.demo import run

    raise typer.Exit(run(ranks, steps, output))


@app.command()
def plan(
    model: Model,
    cluster: ClusterOption,
    global_batch: GlobalBatch = None,
    seq: Seq = None,
    dp: Annotated[int | None, fixed("data parallel degree")] = None,
    tp: Annotated[int | None, fixed("tensor parallel degree")] = None,
    pp: Annotated[int | None, fixed("pipeline stages")] = None,
    cp: Annotated[int | None, fixed("context parallel degree")] = None,
    ep: Annotated[int | None, fixed("expert parallel degree")] = None,
    sequence_parallel: Annotated[bool | None, fixed("split the sequence between tensor-parallel regions")] = None,
    zero: Annotated[int | None, fixed("ZeRO stage, 0 to 3")] = None,
    zero_group: Annotated[int | None, fixed("ranks that share states")] = None,
    micro_batch_size: Annotated[int | None, fixed("rows of a replica's micro-batch")] = None,
    schedule: Annotated[str | None, fixed("gpipe, 1f1b, ...")] = None,
    stage_layers: Annotated[str | None, fixed("layers of each stage, like 8,8,8,8")] = None,
    recompute: Annotated[str | None, fixed("none, selective or full")] = None,
    sync: Annotated[str | None, fixed("allreduce, ps (parameter servers) or async")] = None,
    staleness: Annotated[int | None, fixed("async: steps that a worker may be ahead")] = None,
    servers: Annotated[str | None, fixed("data ranks that serve parameters, like 0,2 (left out: all)")] = None,
    workers: Annotated[str | None, fixed("data ranks that compute, like 0,1 (left out: all)")] = None,
    compression: Annotated[str | None, fixed("gradients sent as 8bit, 1bit or 1bit-adam")] = None,
    delay: Annotated[int | None, fixed("1: a step applies the gradients of the step before it")] = None,
    max_memory: Annotated[str | None, fixed("a device's limit, like 40GiB")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd, ...")] = "adamw",
    precision: Precision = None,
    top: Annotated[int, typer.Option(help="plans to list, the chosen one included", min=1)] = 5,
    time_limit: Annotated[float | None, typer.Option(help="seconds for the search", show_default="none")] = None,
    output: Output = None,
    json: Json = False,
) -> None:
    """Find the best plan for a model on a cluster. No device of the cluster is needed; this machine is priced as `autoplan profile` measured it."""
    from autoplan.commands.planning import plan_command

    chosen = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "sequence_parallel": sequence_parallel, "zero": zero, "zero_group": zero_group}
    chosen |= {"micro_batch_size": micro_batch_size, "schedule": schedule, "stage_layers": stage_layers, "recompute": recompute, "max_memory_bytes": max_memory}
    chosen |= {"sync": sync, "staleness": staleness, "servers": servers, "workers": workers}
    chosen |= {"compression": compression, "delay": delay}
    plan_command(model, cluster, global_batch, seq, chosen, optimizer, precision, top, time_limit, output, as_json=json)


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file")],
    format: Annotated[str, typer.Option("--format", "-f", help="text, json, html or trace (for Perfetto)")] = "text",
    output: Output = None,
) -> None:
    """Show a plan: what was decided, why, and what it is predicted to cost."""
    from autoplan.commands.explaining import explain_command

    explain_command(path, format, output)


@app.command()
def compare(
    model: Model,
    cluster: ClusterOption,
    baselines: Annotated[str, typer.Option(help="comma-separated")] = "ddp,fsdp,megatron,gpipe,two-level,degrees",
    global_batch: GlobalBatch = None,
    seq: Seq = None,
    precision: Precision = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="draw it here, as HTML")] = None,
    json: Json = False,
) -> None:
    """Price the plans that well-known systems would use beside the one found here."""
    from autoplan.commands.comparing import compare_command

    compare_command(model, cluster, baselines, global_batch, seq, precision, output, as_json=json)


@app.command()
def verify(
    model: Model,
    plan: Annotated[Path | None, typer.Option("--plan", help="a plan file; left out: a plan is searched for these ranks")] = None,
    ranks: Annotated[int, typer.Option(help="processes on this machine, at most")] = 4,
) -> None:
    """Run a shrunk model under a plan and in one process, and compare loss and gradients."""
    from autoplan.commands.verifying import verify_command

    raise typer.Exit(verify_command(model, plan, ranks))


@app.command()
def profile(
    model: Model,
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help="a YAML file of paced devices", show_default="this machine")] = None,
    ranks: Annotated[int, typer.Option(help="processes whose links are measured")] = 4,
    global_batch: GlobalBatch = None,
    seq: Seq = None,
    budget: Annotated[float, typer.Option(help="seconds for operators")] = 60.0,
) -> None:
    """Measure a model's operators and this machine's links (or those of paced devices), into the cache of measured prices."""
    from autoplan.commands.profiling import profile_command

    profile_command(model, cluster, ranks, global_batch, seq, budget)


@app.command()
def detect(ranks: Annotated[int | None, typer.Option(help="ranks on this machine", show_default="one a device")] = None, json: Json = False) -> None:
    """Describe this machine's devices as a cluster."""
    from autoplan.commands.listing import detect_command

    detect_command(ranks, as_json=json)


@app.command()
def clusters(json: Json = False) -> None:
    """List the device presets."""
    from autoplan.commands.listing import clusters_command

    clusters_command(as_json=json)


@app.command()
def models(json: Json = False) -> None:
    """List the model presets."""
    from autoplan.commands.listing import models_command

    models_command(as_json=json)


@app.command()
def env(json: Json = False) -> None:
    """Versions, devices and folders, for a problem report."""
    from autoplan.commands.listing import env_command

    env_command(as_json=json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and ends the process with its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        app(words, standalone_mode=True)
    except AutoplanError as error:
        if debug:
            raise
        print(f"autoplan: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        print(f"autoplan: internal error: {type(error).__name__}: {error}\nRun again with --debug for the trace-back, and please report it.", file=sys.stderr)
        sys.exit(1)
