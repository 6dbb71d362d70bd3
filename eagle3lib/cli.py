"""The command line: `python -m eagle3lib run params/smollm2-cpu.yaml`.

Exit codes: 0 done, 1 a check failed or an error, 2 bad parameters or usage, 130 interrupted. An error is one line on
stderr (`error: ...`); with --debug the traceback is shown as well.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3lib.console import RED, Console
from eagle3lib.errors import Eagle3Error, ParamError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the command, return the exit code."""
    args = parser().parse_args(argv)
    return guarded(lambda: args.command(args), args.debug)


def guarded(command: Callable[[], int], debug: bool = False) -> int:
    """Run a command; an exception becomes one line on stderr and an exit code."""
    try:
        return command()
    except Eagle3Error as err:
        return _error(err, debug, err.exit_code)
    except KeyboardInterrupt as err:
        return _error(err, debug, 130)
    except Exception as err:
        return _error(err, debug, 1)


def _error(err: BaseException, debug: bool, code: int) -> int:
    from eagle3lib.runs import one_line

    if debug:
        traceback.print_exc()
    text = str(err) if isinstance(err, Eagle3Error) else one_line(err)
    Console(sys.stderr).say(f"error: {'interrupted' if code == 130 else text}", RED)
    return code


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m eagle3lib", description="Train EAGLE-3 drafts for models served by SGLang.")
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run an experiment: prepare, extract, verify, train, evaluate")
    run.add_argument("params", type=Path, metavar="PARAMS", help="params file (YAML)")
    run.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a parameter; may be repeated")
    run.add_argument("--from", dest="start", default="", metavar="STAGE", help="start at this stage of an existing run")
    run.add_argument("--only", default="", metavar="STAGE", help="run nothing but this stage of an existing run")
    run.add_argument("--force", action="store_true", help="run stages also when nothing changed")
    run.add_argument("--dry-run", action="store_true", help="show what would run with which parameters, and stop")
    run.add_argument("--run-id", default="", metavar="ID", help="name of the run; an existing one is continued")
    run.add_argument("--stage-timeout", type=float, metavar="SECONDS", help="stop a stage that takes longer")
    run.add_argument("--jobs", type=int, default=1, metavar="N", help="of a sweep (lists in --set): runs at the same time")
    run.set_defaults(command=_run)

    doctor = commands.add_parser("doctor", help="look at everything that a start needs, and start nothing")
    doctor.add_argument("params", type=Path, metavar="PARAMS", help="params file (YAML)")
    doctor.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a parameter; may be repeated")
    doctor.add_argument("--clean", action="store_true", help="end and delete what earlier servers of ours have left")
    doctor.set_defaults(command=_doctor)

    report = commands.add_parser("report", help="rebuild a run's report.html and the index of all runs")
    report.add_argument("run", metavar="RUN", help="run id, or the path of a run folder")
    report.set_defaults(command=_report)

    compare = commands.add_parser("compare", help="show runs side by side")
    compare.add_argument("runs", nargs="+", metavar="RUN")
    compare.add_argument("--metric", default="", help="the metric that decides which run is best")
    compare.set_defaults(command=_compare)

    open_ = commands.add_parser("open", help="write a stage's notebook with a run's parameters filled in, for JupyterLab")
    open_.add_argument("run", metavar="RUN")
    open_.add_argument("stage", metavar="STAGE")
    open_.set_defaults(command=_open)

    export = commands.add_parser("export", help="write a run's best draft as a folder that SGLang or vLLM loads")
    export.add_argument("run", metavar="RUN")
    export.add_argument("--layout", choices=("sglang", "vllm"), default="sglang")
    export.add_argument("--out", type=Path, metavar="DIR", help="where to; default: draft-LAYOUT in the run")
    export.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    export.set_defaults(command=_export)

    check = commands.add_parser("check-draft", help="check an EAGLE-3 draft folder, ours or anybody's, as SGLang will read it")
    check.add_argument("draft", type=Path, metavar="DIR")
    check.add_argument("--target", default="", metavar="TARGET", help="also check it against this target (folder, hub name or smollm2)")
    check.set_defaults(command=_check_draft)

    plan = commands.add_parser("plan", help="what a dump will take: bytes, files, hours, room; needs neither GPU nor target")
    plan.add_argument("params", type=Path, metavar="PARAMS", help="params file (YAML)")
    plan.add_argument("--sequences", type=int, required=True, metavar="N")
    plan.add_argument("--tokens", type=int, required=True, metavar="N", help="tokens of all sequences together")
    plan.add_argument("--rate", type=float, default=0.0, metavar="TOKENS/S", help="prefill rate, as 02_extract measured it")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a parameter; may be repeated")
    plan.set_defaults(command=_plan)

    store = commands.add_parser("store", help="dumps on disk: list, verify, describe, delete")
    actions = store.add_subparsers(required=True, metavar="ACTION")
    for name, text in (("ls", "sizes and ages"), ("verify", "read everything and prove every checksum"),
                       ("stat", "what is in it, as JSON"), ("reclaim", "delete the named stores")):
        action = actions.add_parser(name, help=text)
        action.add_argument("paths", nargs="+", type=Path, metavar="PATH")
        action.set_defaults(command=_store, action=name)
        if name == "verify":
            action.add_argument("--drop", action="store_true", help="take damaged samples out, so that 02_extract asks for them again")
        if name == "reclaim":
            action.add_argument("--yes", action="store_true", help="do not ask")
    return top


def _run(args: argparse.Namespace) -> int:
    from eagle3lib import experiment, forecast, params, runner, runs, sweep

    runner.require_limits(args.stage_timeout, args.jobs)
    overrides = params.parse_set(args.set)
    if sweep.axes(params.read_notebooks(runs.notebooks_dir()), params.load(args.params), overrides):
        if args.run_id or args.start or args.only or args.force:
            raise ParamError("a sweep makes runs of its own: leave --run-id, --from, --only and --force out")
        if args.dry_run:
            print(sweep.describe(args.params, overrides))
            return 0
        return sweep.run(args.params, overrides, jobs=args.jobs, stage_timeout_s=args.stage_timeout)
    order = experiment.Order(args.params, overrides, args.run_id, args.start, args.only, args.force)
    if args.dry_run:
        print(forecast.describe(order))
        return 0
    return runner.run(order, stage_timeout_s=args.stage_timeout).exit_code


def _doctor(args: argparse.Namespace) -> int:
    from eagle3lib import doctor, params

    return doctor.report(args.params, params.parse_set(args.set), args.clean)


def _report(args: argparse.Namespace) -> int:
    from eagle3lib import compare, report, runs

    folder = compare.find_one(args.run)
    for path in (report.write(folder), report.write_index(folder.parent)):
        print(runs.show_path(path))
    return 0


def _export(args: argparse.Namespace) -> int:
    from eagle3lib import compare, draftcheck, export

    run = compare.find_one(args.run)
    return draftcheck.report(export.from_run(run, args.out or run / f"draft-{args.layout}", layout=args.layout, dtype=args.dtype))


def _check_draft(args: argparse.Namespace) -> int:
    from eagle3lib import draftcheck, targets

    return draftcheck.report(args.draft, targets.resolve(args.target) if args.target else None)


def _compare(args: argparse.Namespace) -> int:
    from eagle3lib import compare

    print(compare.Comparison(compare.find(args.runs), args.metric or compare.MEASURE))
    return 0


def _open(args: argparse.Namespace) -> int:
    from eagle3lib import compare, openrun, runs

    print(f"jupyter lab {runs.show_path(openrun.write(compare.find_one(args.run), args.stage))}")
    return 0

def _plan(args: argparse.Namespace) -> int:
    from eagle3lib import experiment, params, plan, preflight, runs

    settings = experiment.Experiment.load(args.params, params.parse_set(args.set), runs.notebooks_dir()).settings
    print(plan.from_params({name: setting.value for name, setting in settings.items()}, samples=args.sequences, tokens=args.tokens,
                           tokens_per_s=args.rate, store=runs.runs_dir(), shm=preflight.dump_base()))
    return 0


def _store(args: argparse.Namespace) -> int:
    from eagle3lib import storetool

    more = {"verify": "drop", "reclaim": "yes"}.get(args.action)
    return getattr(storetool, args.action)(args.paths, **({more: getattr(args, more)} if more else {}))
