"""The command line. It parses arguments before it imports anything heavy, so that mistakes are reported at once."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import __version__
from headrace.bench import add_bench_command
from headrace.errors import command, in_words, user_frame
from headrace.settings import ConfigError, describe, parse_override, to_dict, to_toml

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from headrace.config import Recipe

STARTED = time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with one line and status 2 if the user made a mistake, with 1 if the run failed."""
    parser = make_parser()
    known, rest = parser.parse_known_args(arguments)
    try:
        overrides = dict(parse_override(argument) for argument in join_pairs(rest))
        if overrides and known.command not in ("train", "evaluate", "doctor"):
            if known.command == "serve":  # a value may be a token
                rest = [argument.partition("=")[0] for argument in join_pairs(rest)]
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        code = known.run(known, overrides)
    except ConfigError as error:
        print(f"headrace: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt as stopped:
        print(f"headrace: {str(stopped) or 'stopped'}", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # `headrace inspect RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)


def join_pairs(arguments: Sequence[str]) -> list[str]:
    """`--key value` as `--key=value`."""
    joined: list[str] = []
    for argument in arguments:
        if joined and not argument.startswith("--") and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def make_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(prog="headrace", description="Reinforcement learning that keeps the GPUs busy.")
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a recipe; the same command resumes an unfinished run",
        description="Train a recipe. Any setting can be overridden: --train.learning_rate=1e-5",
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("recipe", help="a TOML file; recipes/ has examples")
    train.add_argument("--dry-run", action="store_true", help="check the recipe, print its sizes and all settings, and stop")
    train.add_argument("--run-dir", type=Path, help="the run's folder (default: runs/<recipe>-<time>)")
    train.add_argument(
        "--fresh", action="store_true", help="start a new run where one could be resumed; what --run-dir holds is moved"
    )
    train.add_argument("--resume-anyway", action="store_true", help="resume although the tasks or the model have been edited")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser(
        "evaluate",
        help="evaluate a model or a run on a recipe's held-out tasks",
        description="Evaluate a model on a recipe's held-out tasks. Any setting can be overridden: --evaluate.samples=8",
    )
    evaluate.add_argument(
        "model", metavar="MODEL", help="a run's folder, a checkpoint, a Hugging Face folder or hub name, or builtin:tiny"
    )
    evaluate.add_argument("recipe", metavar="RECIPE", nargs="?", help="a TOML file (default: that of the run)")
    evaluate.add_argument("--against", default="", help="another model, or the JSON file of one: print paired differences")
    evaluate.add_argument("--json", type=Path, help="write the result to this file, with every task")
    evaluate.set_defaults(run=_evaluate)

    merge = commands.add_parser(
        "merge",
        help="write the model that an adapter makes of its base",
        description="Write an adapter and the model it belongs to as one Hugging Face folder, in float32.",
    )
    merge.add_argument("model", metavar="MODEL", help="a run's folder, a checkpoint, or a folder with an adapter")
    merge.add_argument("out", metavar="OUT", type=Path, help="a folder that is new or empty")
    merge.set_defaults(run=_merge)

    doctor = commands.add_parser(
        "doctor",
        help="find what would go wrong with a recipe on this machine, and how to fix it",
        description="Check this machine, and a recipe with its tasks, reward and model. Exits with 1 if there is a problem.",
    )
    doctor.add_argument("recipe", nargs="?", type=Path, help="a TOML file; without one only the machine is checked")
    doctor.add_argument("--run-dir", type=Path, help="the folder the run would use")
    doctor.set_defaults(run=_doctor)

    inspect = commands.add_parser("inspect", help="print a rollout of a run token by token")
    inspect.add_argument("folder", type=Path, help="a run's folder")
    inspect.add_argument("--step", type=int, help="the version that trained it (default: the last whose rollouts were kept)")
    inspect.add_argument("--rollout", help="its id (default: the best and the worst of the step)")
    inspect.set_defaults(run=_inspect)

    envs = commands.add_parser(
        "envs",
        help="list packages with environments, whether they are installed, and how to name them",
        description="List the packages whose environments run here, the version installed, and what to write in a recipe.",
    )
    envs.set_defaults(run=_envs)

    _add_presets(commands)
    _add_serve(commands)
    _add_join(commands)
    add_bench_command(commands)
    return parser


def _add_presets(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    presets = commands.add_parser(
        "presets",
        help="list the libraries that a recipe can be set to work like, or show the settings of one",
        description="List the presets, one line each; `preset = NAME` in a recipe makes a run work as that library does.",
    )
    presets.set_defaults(run=_presets, name=None)
    actions = presets.add_subparsers(dest="action", metavar="show")
    show = actions.add_parser("show", help="print each setting of a preset, its reason, and what differs from the library")
    show.add_argument("name", metavar="NAME", help="as in the list")


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = commands.add_parser(
        "serve",
        allow_abbrev=False,  # `--api-token TOKEN` would be taken for the name of a file, and shown
        help="serve a model over an OpenAI-compatible HTTP API",
        description="Serve a model's completions and chats over an OpenAI-compatible HTTP API.",
        epilog="Tokens come from HEADRACE_API_TOKEN and HEADRACE_CONTROL_TOKEN, or from files; options show in process lists.",
    )
    serve.add_argument("model", metavar="MODEL", help="a Hugging Face folder or hub name, or builtin:tiny (untrained)")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; all but loopback need an API token")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free one")
    serve.add_argument("--slots", type=int, default=64, help="completions decoded at once; more wait")
    serve.add_argument("--queue", type=int, default=1024, help="completions that may wait; what is more is refused with a 429")
    serve.add_argument("--context", type=int, default=0, help="most tokens of prompt and completion; 0: the model's own limit")
    serve.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of weights and computation"
    )
    serve.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one")
    serve.add_argument("--threads", type=int, default=0, help="CPU threads of torch; 0: one per core")
    serve.add_argument("--name", help="what clients call the model (default: MODEL)")
    serve.add_argument(
        "--adapter",
        metavar="NAME=FOLDER",
        action="append",
        default=[],
        help="also serve the model with this adapter, to requests for the model NAME; may be repeated",
    )
    serve.add_argument("--api-token-file", type=Path, help="holds what clients must send (default: HEADRACE_API_TOKEN)")
    serve.add_argument("--control-token-file", type=Path, help="gives access to /control (default: HEADRACE_CONTROL_TOKEN)")
    serve.set_defaults(run=_serve)


def _add_join(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    join = commands.add_parser(
        "join",
        allow_abbrev=False,  # `--token TOKEN` would be taken for the name of a file
        help="generate or train on this host for a run on another one",
        description="Join a run whose recipe has cluster.listen, and work for it until it ends or SIGTERM comes.",
        epilog="The token comes from HEADRACE_TOKEN or from a file; options show in process lists.",
    )
    join.add_argument("url", metavar="URL", help="[tls://][FINGERPRINT@]HOST:PORT, as the run prints it")
    join.add_argument("--role", choices=["engine", "trainer"], default="engine", help="what this host does for the run")
    join.add_argument("--token-file", default="", help="holds the run's token (default: HEADRACE_TOKEN)")
    join.add_argument(
        "--engines", type=int, default=1, help="engines, or trainer ranks; each on its own GPU while there are enough"
    )
    join.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one")
    join.add_argument("--threads", type=int, default=0, help="CPU threads of each; 0 shares the cores among them")
    join.add_argument("--address", default="", help="of this host, which others reach (default: found out)")
    join.add_argument("--folder", type=Path, help="for logs, and checkpoints on their way (default: one that is removed)")
    join.add_argument("--wait", type=float, default=600.0, help="seconds to wait for a run that is not there, or is gone")
    join.set_defaults(run=_join)


def settings_help() -> str:
    """Every setting with its documentation, for --help."""
    from headrace.config import Recipe

    lines = ["settings:"]
    for key, kind, default, text in describe(Recipe):
        lines += [f"  {key} = {default or '(required)'}", f"      {text} [{kind}]"]
    return "\n".join(lines)


def _train(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from headrace.config import load_recipe

    recipe = load_recipe(options.recipe, overrides)
    if options.dry_run:
        print(f"\n{to_toml(to_dict(recipe))}")
    print("\n".join(recipe.derivation()), flush=True)
    return _told(lambda: _dry_run(recipe) if options.dry_run else _launch(recipe, options))


def _dry_run(recipe: Recipe) -> None:
    _check_inputs(recipe)
    print("\ndry run: the recipe is valid; nothing was started")


def _told(call: Callable[[], None]) -> int:
    """Call it and return the exit status; a failure is shown in a few lines (the log has the traceback)."""
    try:
        call()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001
        notes = "".join(f"\n  {note}" for note in [user_frame(error), *getattr(error, "__notes__", [])] if note)
        print(f"headrace: {in_words(error)}{notes}", file=sys.stderr)
        return 1
    return 0


def _launch(recipe: Recipe, options: argparse.Namespace) -> None:
    from headrace.launch import Launch, UserInputs, launch

    how = Launch(
        name=Path(options.recipe).stem,
        recipe_text=Path(options.recipe).read_text(),
        run_dir=options.run_dir,
        fresh=options.fresh,
        resume_anyway=options.resume_anyway,
        command_started=STARTED,
        command=f"{command()} {shlex.join(sys.argv[1:])}",
    )
    launch(recipe, UserInputs(), how)


def _evaluate(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from headrace.config import load_recipe

    recipe = None if options.recipe is None else load_recipe(options.recipe, overrides)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json}: its folder does not exist")

    def evaluate() -> None:
        from headrace.launch import UserInputs, evaluate as launch_evaluation

        found = launch_evaluation(options.model, recipe, UserInputs(), overrides=overrides, against=options.against)
        print(found)
        if options.json is not None:
            options.json.write_text(json.dumps(found.to_dict(), indent=1) + "\n")

    return _told(evaluate)


def _merge(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from headrace import merge

    return _told(lambda: print(f"merged     {merge(options.model, options.out)}"))


def _envs(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from headrace.envs import list_adapters

    print("\n".join(list_adapters()))
    return 0


def _presets(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from headrace.config import list_presets, show_preset

    print(list_presets() if options.name is None else show_preset(options.name))
    return 0


def _doctor(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from headrace.plan import Subject, examine, render

    if overrides and options.recipe is None:
        raise ConfigError(f"--{next(iter(overrides))}: there is no recipe to override; name one")
    found: Counter[str] = Counter()
    for finding in examine(Subject(recipe_path=options.recipe, overrides=overrides, run_dir=options.run_dir)):
        found[finding.level] += 1
        print(render(finding), flush=True)
    print("\n" + ", ".join(f"{found[level] or 'no'} {level}{'s' * (found[level] > 1)}" for level in ("problem", "warning")))
    return 1 if found["problem"] else 0


def _check_inputs(recipe: Recipe) -> None:
    """What a dry run checks: tasks, rewards, and a loss or advantage other than the default (looking one up imports torch)."""
    from headrace.launch import UserInputs, check_inputs
    from headrace.trainer import TrainSettings

    train, usual = recipe.train, TrainSettings()
    try:
        for note in check_inputs(recipe, UserInputs()):
            print(note)
        if recipe.lora.is_on and recipe.steps:
            from headrace.launch import describe_adapter

            print(describe_adapter(recipe))
        if recipe.engine.vllm.shards > 1:
            from headrace.launch import check_division

            check_division(recipe)
        if train.parallel.is_on:
            from headrace.launch import describe_memory

            print(describe_memory(recipe))
        if (train.loss, train.advantage, train.constants) != (usual.loss, usual.advantage, usual.constants):
            from headrace.algorithms import check_loss
            from headrace.launch import check_columns

            check_loss(train.loss, train.constants)
            check_columns(recipe, UserInputs())
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _inspect(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from headrace.observe import EVENTS, read_lines, read_rollouts, render

    for event in read_lines(options.folder / EVENTS) if (options.folder / EVENTS).exists() else ():
        what = f"{event['key']} {event['was']} -> {event['value']}" if event["event"] == "change" else "stopped"
        print(f"version {event['version']}: {what}, by {event['by']}")
    step, rollouts = read_rollouts(options.folder, options.step)
    ordered = sorted(rollouts, key=lambda rollout: rollout.reward or 0.0)
    chosen = [ordered[-1], ordered[0]]
    if options.rollout is not None:
        chosen = [rollout for rollout in rollouts if rollout.id == options.rollout]
    if not chosen:
        raise ConfigError(f"step {step} has no rollout {options.rollout!r}; it has {rollouts[0].id} …")
    token_text = _token_text(options.folder)
    print(f"step {step}: {len(rollouts)} rollouts")
    for rollout in chosen:
        print("\n" + render(rollout, token_text))
    return 0


def _token_text(folder: Path) -> Any:  # noqa: ANN401  (a function from token id to text)
    from headrace.model import load_tokenizer
    from headrace.run import checkpoints_in

    checkpoints = checkpoints_in(folder / "checkpoints")
    if not checkpoints:
        return str
    tokenizer = load_tokenizer(str(checkpoints[-1]))
    return lambda token: str(tokenizer.decode([token]))


def _serve(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from headrace.engine import bind

    options.api_token = _token(options.api_token_file, "API")
    options.control_token = _token(options.control_token_file, "CONTROL")
    if options.api_token is not None and options.api_token == options.control_token:
        raise ConfigError("the API token and the control token are the same; a client's token must not give access to /control")
    for name, least in (("slots", 1), ("queue", 0), ("context", 0), ("threads", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: must be ≥ {least}")
    if options.model.startswith((".", "/", "~")) and not Path(options.model).exists():
        raise ConfigError(f"model {options.model!r}: the folder does not exist")
    options.name = options.name or options.model
    options.adapters = _adapters(options)
    listener = bind(options.host, options.port, has_token=options.api_token is not None)

    from headrace.launch import serve

    try:
        return serve(options, listener)
    except RuntimeError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1


def _join(options: argparse.Namespace, overrides: dict[str, Any]) -> int:
    from headrace.launch import JoinOptions, join, read_token

    token = read_token(options.token_file, setting="--token-file")
    if not token:
        raise ConfigError("there is no token: set HEADRACE_TOKEN, or name a file with --token-file")
    if options.engines < 1:
        raise ConfigError(f"--engines {options.engines}: must be ≥ 1")
    names = ("url", "role", "engines", "device", "threads", "address", "folder", "wait")
    return join(JoinOptions(token=token, **{name: getattr(options, name) for name in names}))


def _adapters(options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """(name, folder) of each `--adapter`."""
    found: dict[str, str] = {}
    for given in options.adapter:
        name, _, folder = given.partition("=")
        if not (name and folder):
            raise ConfigError(f"--adapter {given}: write NAME=FOLDER, such as --adapter math=runs/math/checkpoints/step-100")
        if name in found or name == options.name:
            raise ConfigError(f"--adapter {given}: {name!r} is taken; give each adapter a name of its own")
        if not Path(folder).is_dir():
            raise ConfigError(f"--adapter {given}: the folder does not exist")
        found[name] = folder
    return tuple(found.items())


def _token(file: Path | None, kind: str) -> str | None:
    """From the file, else from the environment."""
    from headrace.launch import read_token_file

    if file is None:
        return os.environ.get(f"HEADRACE_{kind}_TOKEN") or None
    return read_token_file(file, setting=f"--{kind.lower()}-token-file")


if __name__ == "__main__":
    main()
