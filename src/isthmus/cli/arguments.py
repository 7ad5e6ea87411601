"""The arguments of the command line. Nothing heavy is imported here, so that `isthmus --help` answers at once."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

from isthmus import __version__
from isthmus.errors import UsageError

__all__ = ["Parser", "build_parser", "parse_arguments", "unknown"]

_MODEL_HELP = "zoo:NAME, hf:CONFIG.json, package.module:function or a saved MODEL.json"
_SEQUENCE_HELP = "tokens of a sample, for the models that have them"
_PROFILE_HELP = "measured times of blocks and collectives, used instead of the catalog's; may be repeated"
_CHOICE = re.compile(r"argument (?P<what>\S+): invalid choice: '(?P<word>[^']*)'", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Argparse with our own errors, which propose the nearest correct word."""

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError that says what argparse objects to."""
        match = _CHOICE.match(message)
        if match:
            raise unknown(f"no {match['what'].lower()}", match["word"], self._words(match["what"]), self.prog)
        raise UsageError(message, where=self.prog, next=f"See {self.prog} --help")

    def options(self) -> list[str]:
        """Return every option that this parser takes."""
        return [option for action in self._actions for option in action.option_strings]

    def commands(self) -> dict[str, Parser]:
        """Return the parser of each command below this one."""
        groups = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: parser for group in groups for name, parser in group.choices.items()}

    def _words(self, option: str) -> list[str]:
        """Return what the option may be; if it is none of ours, argparse means the command."""
        for action in self._actions:
            if option in action.option_strings:
                return [str(choice) for choice in action.choices or ()]
        return list(self.commands())


def unknown(what: str, word: str, known: Sequence[str], where: str) -> UsageError:
    """Return an error for a word that is not known: `isthmus: no command 'pln'. Did you mean 'plan'?`."""
    near = difflib.get_close_matches(word[:64], known, n=1)
    return UsageError(
        f"{what} {word[:64]!r}",
        where=where,
        expected=None if near else f"one of {', '.join(known)}",
        next=f"Did you mean {near[0]!r}?" if near else f"See {where} --help",
    )


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the words as fields, of which `command` names the module to run; raise UsageError if they make no sense.

    Missing arguments are reported last, so that `--clustr` is reported as misspelt and not `--cluster` as missing.
    """
    end = words.index("--") if "--" in words and words[0] == "emulate" else len(words)
    args, rest = build_parser().parse_known_args(words[:end])
    args.argv = list(words[end + 1 :])  # the user's own command
    parser: Parser = args.parser
    for word in rest:
        option = word.partition("=")[0]
        if option.startswith("-"):
            raise unknown("no option", option, parser.options(), parser.prog)
    if rest:
        raise UsageError("unexpected argument", where=parser.prog, found=repr(rest[0][:64]))
    for field in args.needs:
        if getattr(args, field) is None:
            raise UsageError(f"--{field} is missing", where=parser.prog, next=f"See {parser.prog} --help")
    return args


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(
        prog="isthmus",
        description="Find the fastest way to train PyTorch models on unequal, distant machines.",
        epilog="Start here: isthmus doctor; then isthmus plan zoo:gpt-tiny --cluster examples/clusters/demo.yaml",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"isthmus {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add(commands, "doctor", "show what this machine can do, and what is missing")
    cluster = commands.add_parser("cluster", help="describe clusters of machines", allow_abbrev=False)
    clusters = cluster.add_subparsers(metavar="COMMAND", required=True)
    show = _add(clusters, "show", "show the devices and links of a cluster, and a map", "cluster")
    show.add_argument("file", metavar="FILE", help="a cluster file")
    made = _add(
        clusters,
        "import",
        "write a cluster file from a hostfile, Slurm or the Hulk data",
        "cluster_import",
        needs=("output",),
    )
    _cluster_import(made)
    _cluster_probe(
        _add(clusters, "probe", "measure the links of a cluster, and write a cluster file with them", "cluster_probe")
    )
    model = commands.add_parser("model", help="look at models", allow_abbrev=False)
    _model_show(
        _add(model.add_subparsers(metavar="COMMAND", required=True), "show", "show what a model costs", "model")
    )
    _plan(_add(commands, "plan", "find a plan, and compare it with the usual schemes", needs=("cluster",)))
    _simulate(_add(commands, "simulate", "price a plan again, and write its timeline"))
    _explain(_add(commands, "explain", "say what limits a plan, and what would help"))
    _train(_add(commands, "train", "train by a plan, on this machine"))
    _profile(_add(commands, "profile", "measure the blocks of a model on this machine's device"))
    _emulate(_add(commands, "emulate", "run a command on every host of a cluster, emulated on this machine"))
    _export(_add(commands, "export", "write the weights of a checkpoint as one safetensors file", needs=("output",)))
    _report(_add(commands, "report", "write a plan as one page of HTML", needs=("output",)))
    return parser


def _add(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    text: str,
    command: str | None = None,
    needs: tuple[str, ...] = (),
) -> Parser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(command=command or name, parser=parser, needs=needs)
    return parser


def _cluster_import(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", nargs="?", help="a hostfile: lines like worker-1 slots=4")
    parser.add_argument("--slurm", action="store_true", help="the nodes of the Slurm job that this runs in")
    parser.add_argument("--hulk", nargs=2, metavar=("NODES.csv", "EDGES.txt"), help="the two files of the Hulk data")
    parser.add_argument("--kind", metavar="KIND", help="the kind of every device (required, except with --hulk)")
    parser.add_argument("--region", metavar="NAME", help="the region of the hosts (default: here)")
    parser.add_argument("--bandwidth", metavar="RATE", help='bandwidth between hosts, like "25 Gbit/s"')
    parser.add_argument("--latency", metavar="TIME", help='latency between hosts, one way, like "0.1 ms"')
    parser.add_argument("--fill", action="store_true", help="with --hulk: also link pairs that were not measured")
    parser.add_argument("-o", "--output", metavar="FILE", help="the cluster file to write (required)")


def _cluster_probe(parser: Parser) -> None:
    parser.add_argument("file", metavar="CLUSTER", help="a cluster file; what is not measured is copied from it")
    parser.add_argument("--emulate", action="store_true", help="measure emulated hosts on this machine")
    parser.add_argument(
        "--host", metavar="NAME", help="the host that this machine is (run the same command on every host)"
    )
    parser.add_argument("--meet", metavar="ADDRESS:PORT", help="where the first host of the file waits for the others")
    parser.add_argument(
        "--token-file", metavar="FILE", help="a file with a secret that all hosts share (default: $ISTHMUS_TOKEN)"
    )
    parser.add_argument(
        "--wait",
        type=_seconds,
        metavar="SECONDS",
        default=300.0,
        help="how long to wait for the other hosts (default: 300)",
    )
    parser.add_argument(
        "--seconds", type=_seconds, metavar="N", default=2.0, help="seconds to send each way, at least (default: 2)"
    )
    parser.add_argument("--trunks", action="store_true", help="also send between two regions on several pairs at once")
    parser.add_argument("--nics", action="store_true", help="also send between each host and several others at once")
    parser.add_argument(
        "--collectives", metavar="PROFILE.json", help="also measure all-reduces, and write them to this profile"
    )
    parser.add_argument(
        "--among",
        metavar="HOST,HOST",
        action="append",
        default=[],
        help="measure all-reduces among these hosts, not among all, each region and each two regions; may be repeated",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the cluster file to write (default: CLUSTER.probed.yaml)"
    )


def _model_show(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("--sequence", type=_whole, metavar="N", help=_SEQUENCE_HELP)
    parser.add_argument(
        "--save", metavar="FILE.json", help="write the captured model, to plan on machines without its code"
    )


def _plan(parser: Parser) -> None:
    parser.add_argument("what", metavar="MODEL|JOB|WORKLOAD", help=f"{_MODEL_HELP}; or a job or workload file (.yaml)")
    parser.add_argument("--cluster", metavar="FILE", help="the cluster file to plan for (required)")
    parser.add_argument("--batch", type=_whole, metavar="N", help="samples per step of the whole job (default: 32)")
    parser.add_argument("--sequence", type=_whole, metavar="N", help=_SEQUENCE_HELP)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="default: the fastest that every kind of device offers"
    )
    _independent(parser)
    parser.add_argument("--profile", metavar="FILE", action="append", default=[], help=_PROFILE_HELP)
    parser.add_argument(
        "--planner",
        metavar="NAME",
        default="auto",
        help="auto (the default: improves on the best scheme), split, exact, search, learned, or a scheme of the table",
    )
    parser.add_argument("--fix", metavar="tp=2,pp=4", help="pin degrees of the grid planner: tp, pp, dp, micro")
    parser.add_argument("--budget", type=_seconds, metavar="SECONDS", help="stop searching after this time")
    parser.add_argument("--calls", type=_whole, metavar="N", help="stop searching after this many simulated plans")
    parser.add_argument("--seed", type=_seed, metavar="N", default=0, help="seed of the search (default: 0)")
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan: .json, or its text as .plan or .txt")


def _simulate(parser: Parser) -> None:
    _planned(parser)
    parser.add_argument("--trace", metavar="FILE", help="write one step as a Chrome trace, which Perfetto opens")
    parser.add_argument("--orders", action="store_true", help="also print the tasks of every device, in their order")


def _explain(parser: Parser) -> None:
    _planned(parser)
    parser.add_argument("--schemes", action="store_true", help="also plan with every scheme, and say what limits it")
    parser.add_argument(
        "--budget", type=_seconds, metavar="SECONDS", default=3.0, help="time to search for each scheme (default: 3)"
    )


def _train(parser: Parser) -> None:
    known = "a plan file, a job file (.yaml), zoo:NAME, hf:CONFIG.json or package.module:function"
    parser.epilog = "Data and a loss of your own are named in a job file: docs/jobs.md says what they must give."
    parser.add_argument("what", metavar="PLAN|JOB", help=known)
    parser.add_argument("--cluster", metavar="FILE", help="the cluster file to plan for (required for a job)")
    parser.add_argument("--batch", type=_whole, metavar="N", help="samples per step of the whole job (default: 32)")
    parser.add_argument("--sequence", type=_whole, metavar="N", help=_SEQUENCE_HELP)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), help="default: the fastest that every kind of device offers"
    )
    _independent(parser)
    parser.add_argument("--steps", type=_whole, metavar="N", help="steps to train in all (default: the job's, or 1000)")
    parser.add_argument(
        "--engine",
        type=_engine,
        default="local",
        metavar="local",
        help="what starts workers: processes on this machine",
    )
    parser.add_argument(
        "--emulate", action="store_true", help="emulate the cluster's links and slow devices on this machine"
    )
    parser.add_argument("--profile", metavar="FILE", action="append", default=[], help=_PROFILE_HELP)
    parser.add_argument("--nccl", action="store_true", help="use NCCL between GPUs that have one worker each")
    parser.add_argument(
        "--ignore-memory", action="store_true", help="start even if workers need more memory than is free here"
    )
    parser.add_argument("--checkpoint", metavar="DIR", help="save checkpoints here, at the end and when interrupted")
    parser.add_argument("--every", type=_whole, metavar="N", help="also save after every N steps")
    parser.add_argument("--resume", action="store_true", help="resume from the newest whole checkpoint there, if any")
    parser.add_argument("--export", metavar="FILE", help="write the trained weights as one safetensors file")
    parser.add_argument(
        "--trace", metavar="FILE", help="write the last step as a Chrome trace, as measured and as predicted"
    )
    parser.add_argument(
        "--events",
        metavar="FILE",
        help="write the events of the run, one JSON object per line; with --resume, append them",
    )
    parser.add_argument("--tensorboard", metavar="DIR", help="write loss and times for TensorBoard")
    parser.add_argument("--wandb", metavar="DIR", help="write loss and times for Weights & Biases, offline")
    _trusted(parser)


def _profile(parser: Parser) -> None:
    known = "zoo:NAME, hf:CONFIG.json or package.module:function"
    parser.add_argument("model", metavar="MODEL", help=known)
    parser.add_argument("--device", metavar="KIND", help="what your cluster file calls the device (its catalog name)")
    parser.add_argument("--sequence", type=_whole, metavar="N", help=_SEQUENCE_HELP)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="default: the fastest that the kind has")
    parser.add_argument(
        "--emulate",
        metavar="CLUSTER",
        help="measure for the device kinds of a cluster, slowed down as in train --emulate",
    )
    parser.add_argument(
        "--samples", type=_wholes, metavar="N,N", help="numbers of samples to measure (default: 1,2,4,8)"
    )
    parser.add_argument(
        "--threads", type=_whole, metavar="N", help="processor threads that one worker has (default: all cores)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the profile to write (default: NAME.profile.json)")


def _emulate(parser: Parser) -> None:
    parser.usage = "isthmus emulate CLUSTER [OPTION ...] -- COMMAND ..."
    parser.epilog = "COMMAND finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, and ISTHMUS_HOST."
    known = "10 s virginia frankfurt bandwidth=100 Mbit/s; or latency=80 ms, loss=0.01, cut, mend; may be repeated"
    parser.add_argument("file", metavar="CLUSTER", help="a cluster file")
    parser.add_argument("--on", metavar="HOST", nargs="+", action="extend", help="run only on these hosts")
    parser.add_argument("--unshaped", action="store_true", help="use loopback, and do not emulate links")
    parser.add_argument("--change", metavar="'AT A B WHAT'", action="append", default=[], help=known)


def _export(parser: Parser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="the folder of a checkpoint, or of several, of which the newest is taken",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE.safetensors|FOLDER/",
        help="where to write the weights (required); a folder: with the configuration, for from_pretrained",
    )
    parser.add_argument("--average", action="store_true", help="write the moving average of the weights instead")


def _report(parser: Parser) -> None:
    _planned(parser)
    parser.add_argument("--run", metavar="EVENTS", help="also show a run: what isthmus train --events wrote")
    parser.add_argument("-o", "--output", metavar="FILE.html", help="where to write the page (required)")


def _planned(parser: Parser) -> None:
    """Add the arguments of a plan that is priced again."""
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    parser.add_argument("--cluster", metavar="FILE", help="price on this cluster, and not on the plan's own")
    parser.add_argument("--profile", metavar="FILE", action="append", default=[], help=_PROFILE_HELP)
    _trusted(parser)


def _independent(parser: Parser) -> None:
    parser.add_argument(
        "--trust-independent-samples",
        action="store_true",
        default=None,
        help="split the batch even where samples are not proven to stay apart, at your own risk",
    )


def _trusted(parser: Parser) -> None:
    parser.add_argument(
        "--model",
        metavar="SPEC",
        action="append",
        default=[],
        help="code that the plan names and that may be run, as package.module:function; may be repeated",
    )


def _engine(text: str) -> str:
    if text != "local":
        raise argparse.ArgumentTypeError(
            f"no --engine {text[:40]!r} in this version; --engine local, or none, trains with processes on this machine"
        )
    return text


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of 1 or more")
    return int(text)


def _wholes(text: str) -> tuple[int, ...]:
    return tuple(sorted({_whole(part) for part in text.split(",")}))


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds, like 0.5 or 30")
    return float(text)
