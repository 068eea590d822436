"""The command line beside pytest: ``conformance list | show | repro | ...``, also as ``python -m conformance``.

Each subcommand imports what it needs when it runs: listing ids or counts imports no torch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from conformance.cases import options
from conformance.commands import bench as bench_commands
from conformance.commands import records as record_commands
from conformance.commands import upkeep as upkeep_commands
from conformance.errors import ConformanceError
from conformance.registry import ROOT, kernels, matrices, put_checkout_first

OK, FAILED, USAGE, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141

_EPILOG = """\
exit codes:
  0    done; 'report', 'merge': the records are whole and hold no failure; for 'zoo': every mutant is killed
  1    'report': the records hold failures or problems, or the run never ended; 'zoo': a mutant survives, is not
       decided, was not shown to differ from its twin, or a control is flagged; 'merge': failures, problems, or
       machines that disagree;
       'diff': the second run has new failures, or lacks results; 'bench': nothing was timed; 'bench-diff': something
       became slower, or is not timed any more
  2    wrong usage: unknown name, option or case, unreadable or unwritable file; 'merge': shards that are no one run
  130  interrupted        141  the reader of a pipe went away

Cases are run by pytest: 'python -m pytest -n auto' runs the default tiers, 'python -m pytest --help' lists the same
options.
"""

_LIST = """\
Without --operator, --tier, --data, --case or a format: an overview of operators, tiers, edge families and kernels.
Otherwise the selected cases, one id per line; the default are the tiers that pytest runs. With --arch only those that
are meant for one of the architectures; how many are not, and why, goes to stderr.
"""
_SHOW = """\
Of an operator: what it computes, its arguments with shapes, dtypes and layouts, its policies and error budget. Of a
case: parameters, tiers and edge family, shapes and dtypes at both sizes, memory, FLOPs and bytes, which kernels
take it and why others do not, and how to run it.
"""
_REPRO = """\
Prints the pytest line that reruns a case. --write also makes a Python file that rebuilds the same inputs, runs golden
and kernel, and shows the elements that differ. That file exits with 0 when the kernel holds its promise, 1 when it
does not, 2 when the case cannot run. --minimise shrinks the case first: fewer tokens, slots and columns, plainer data,
as long as it fails alike, with the same cause; the file is run before it is handed out.
"""
_RULES = """\
Prints every rule of expectation (matrices/archs/*.toml, --expectations FILE) with the number of cases it governs, and
what is wrong with them: stale, ambiguous, past their end. --update RECORDS prints a unified diff that would make the
rules agree with a run, to be read and applied by a person: it removes and narrows, and never widens. Exit code 1 when
something is wrong with the rules, or when there is something to change.
"""


class _Parser(argparse.ArgumentParser):
    """One line of error instead of a usage text, and no guessing of shortened options."""

    def error(self, message: str) -> NoReturn:
        raise ConformanceError(f"{message}; '{self.prog} --help' explains")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code; see the epilog of ``--help``."""
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        _check_empty(words)
        args = _parser().parse_args(words)
        put_checkout_first()
        if not matrices():
            raise ConformanceError(f"no matrix was found in {ROOT / 'matrices'}: the suite runs from its checkout")
        run: Callable[[argparse.Namespace], int] = args.run
        code = run(args)
        sys.stdout.flush()
    except ConformanceError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # as after '| head': what is still buffered must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    return code


def _check_empty(words: Sequence[str]) -> None:
    """Raises ConformanceError for an empty word: as a path it would be the current directory, as a name nothing."""
    for before, word in itertools.pairwise(["", *itertools.takewhile(lambda word: word != "--", words)]):
        flag, equals, value = word.partition("=")
        if not word.strip():
            raise options.empty(before if before.startswith("-") else "an argument")
        if flag.startswith("--") and equals and not value.strip():
            raise options.empty(flag)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m conformance",
        description="Conformance of MoE GPU kernels: list cases, show one, repeat one, rebuild reports.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int], details: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=details, formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(run=run)
        return sub

    listing = add("list", "what there is: an overview, or the cases of a selection", _list, _LIST)
    form = listing.add_mutually_exclusive_group()
    form.add_argument("--count", action="store_true", help="only how many cases are selected")
    form.add_argument("--coverage", action="store_true", help="how well --tier (default: smoke) covers official")
    form.add_argument("--json", action="store_true", help="id, params, tiers, family, variant, group, devices, as JSON")
    options.add_to_argparse(
        listing, tier="tiers whose cases are listed (default: those that pytest runs)",
        arch="only cases that are meant for one of these architectures (default: of all)",
        kernels="only these kernels in the overview; a module adds its own. Cases are the same for all kernels")

    one = "id of a case as 'list' prints it, or pytest's node id of an item"
    show = add("show", "an operator's contract, or all about one case", _show, _SHOW)
    show.add_argument("case", metavar="OPERATOR|CASE", help=f"an operator, or {one}")
    options.add_to_argparse(show, but=("--operator", "--tier", "--case"))

    repro = add("repro", "repeat one case: a pytest line, or a Python file of its own", _repro, _REPRO)
    repro.add_argument("case", metavar="CASE", help=one)
    repro.add_argument("--kernel", metavar="NAME", help="only this one of the kernels that --kernels chooses")
    repro.add_argument("--write", metavar="FILE", type=Path, help="write the Python file; needs one kernel")
    repro.add_argument("--minimise", action="store_true", help="write the file of the smallest case that fails alike")
    repro.add_argument("--within", metavar="SECONDS", type=float, default=60.0, help="time for that (default: 60)")
    options.add_to_argparse(repro, but=("--operator", "--tier", "--case"))

    record_commands.add_to(add)
    bench_commands.add_to(add)

    rules = add("expectations", "rules per architecture: what governs what, and what to change", _expectations, _RULES)
    rules.add_argument("--update", metavar="RECORDS", type=Path, help="propose changes that a run asks for, as a diff")
    rules.add_argument("--rule-set", metavar="NAME", help="a published kernel's rules, over its own cells")
    options.add_to_argparse(
        rules, but=("--tier", "--sizes", "--data", "--case"), arch="architectures (default: all that have a table)",
        kernels="kernels beside this checkout's, by module, that rules may be about")

    upkeep_commands.add_to(add)
    return parser


def _list(args: argparse.Namespace) -> int:
    from conformance.commands import listing

    selection = options.selected(args)
    if selection.kernels:  # a wrong name is an error even where only cases are printed
        for of in selection.matrices():
            kernels(of.operator, selection.kernels)
    if selection.archs:
        from conformance.environment import chosen_archs

        chosen_archs(selection.archs)
    if args.count:
        listing.print_count(selection)
    elif args.coverage:
        listing.print_coverage(selection)
    elif args.json:
        listing.print_json(selection)
    elif selection.operators or selection.tiers or selection.cases or args.conformance_data:
        listing.print_ids(selection)
    else:
        listing.print_overview(selection)
    return OK


def _show(args: argparse.Namespace) -> int:
    if args.case in matrices():
        from conformance.commands.contract import print_contract

        print_contract(args.case)
        return OK
    from conformance.commands.show import show

    show(args.case, options.selected(args))
    return OK


def _repro(args: argparse.Namespace) -> int:
    from conformance.commands.repro import repro

    repro(args.case, options.selected(args), args.kernel, args.write, args.within if args.minimise else None)
    return OK


def _expectations(args: argparse.Namespace) -> int:
    from conformance.commands import expectations

    selection = options.selected(args)
    if args.rule_set:
        return OK if expectations.print_rule_set(args.rule_set, selection.archs) else FAILED
    if args.update:
        return OK if expectations.print_update(record_commands.record_file(args.update), selection) else FAILED
    return OK if expectations.print_rules(selection) else FAILED


if __name__ == "__main__":
    sys.exit(main())
