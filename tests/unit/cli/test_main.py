"""The `engram` command: its subcommands, its help, and errors that are one line naming what to change."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import engram_runtime
from engram_runtime.cli.lazy import CommandError, load
from engram_runtime.cli.main import build_parser, main
from engram_runtime.cli.quantities import override, seconds, show_size, size
from engram_runtime.cli.serving import engine_config
from tests.support import patience

COMMANDS = ("serve", "chat", "batch", "snapshots", "ops", "autotune", "fetch", "activator", "up")


def said(capsys, *args):
    """(exit code, standard error) of one command line."""
    try:
        code = main([str(arg) for arg in args])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert len(capsys.readouterr().out) > 200


@pytest.mark.parametrize("action", ["ls", "show", "rm", "sweep", "fsck"])
def test_snapshot_actions_take_a_server_or_a_store(action, capsys):
    with pytest.raises(SystemExit):
        main(["snapshots", action, "--help"])
    shown = capsys.readouterr().out
    assert "--base-url" in shown
    assert "--store" in shown


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {command}" in shown for command in COMMANDS)


def test_every_flag_of_serve_has_a_help_text():
    parser = build_parser([])
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for action in subparsers.choices["serve"]._actions:
        assert action.help, action.option_strings


def test_the_dtype_of_states_reaches_the_engine():
    options = build_parser([]).parse_args(["serve", "--model", "m", "--state-dtype", "bfloat16"])
    assert engine_config(options).state_dtype == "bfloat16"
    assert engine_config(build_parser([]).parse_args(["batch", "--model", "m", "--prompts-file", "p"])).state_dtype == (
        "float32"
    )


def test_help_is_quick_and_light():
    code = "import sys; from engram_runtime.cli.main import build_parser; build_parser(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience.SECONDS, check=True
    )
    loaded = set(done.stdout.split())
    assert loaded & {"torch", "transformers", "fastapi", "uvicorn", "boto3", "kopf", "prometheus_client"} == set()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--model", ".", "--max-model-len", "1"], "--max-model-len must be >= 2"),
        (["serve", "--model", ".", "--tensor-parallel-size", "2"], "--tensor-parallel-size must be 1"),
        (["serve", "--model", ".", "--max-num-seqs", "0"], "--max-num-seqs must be >= 1"),
        (["serve", "--model", ".", "--snapshot-store", "s3:/x"], "--snapshot-store must be"),
        (["serve", "--model", ".", "--retention-keep-last", "0"], "--retention-keep-last must be >= 1"),
        (["serve", "--model", ".", "--gc-grace-seconds", "-1"], "--gc-grace-seconds must be >= 0"),
        (["serve", "--model", ".", "--api-keys-dir", "/no/such"], "--api-keys-dir must be a folder"),
        (["serve", "--model", ".", "--tenant-key-file", "/no/such"], "--tenant-key-file /no/such cannot be read"),
        (["serve", "--model", ".", "--port", "70000"], "port must be between"),
        (["serve", "--model", ".", "--port", "9", "--admin-port", "9"], "--admin-port must differ"),
        (["serve", "--model", ".", "--max-queue", "-1"], "--max-queue must be >= 0"),
        (["serve", "--model", ".", "--snapshot-disk", "4Q"], "--snapshot-disk: expected a size"),
        (["serve", "--model", ".", "--retention-max-age", "1y"], "--retention-max-age: expected a time"),
        (["serve", "--model", ".", "--op", "linear"], "expected OP=BACKEND"),
        (["serve", "--model", ".", "--dtype", "int4"], "--dtype"),
        (["serve", "--model", ".", "--state-dtype", "float16"], "--state-dtype"),
        (["serve", "--model", ".", "--nonsense"], "--nonsense"),
        (["serve"], "--model"),
        (["batch", "--model", ".", "--prompts-file", "/no/such"], "--prompts-file /no/such cannot be read"),
        (
            ["batch", "--model", ".", "--prompts-file", __file__, "--output", "/no/such/x"],
            "--output /no/such/x",
        ),
        (["chat", "--base-url", "http://127.0.0.1:9"], "does not answer"),
        (["chat", "--base-url", "http://x", "--model", "."], "exclude each other"),
        (["snapshots", "ls", "--store", "x3://b"], "--store must be file:///"),
        (["snapshots", "ls", "--store", "file:///no/such"], "there is no such folder"),
        (["snapshots", "ls", "--limit", "0"], "--limit must be >= 1"),
        (["snapshots", "ls", "--store", "file:///tmp", "--base-url", "http://x"], "exclude each other"),
        (["snapshots", "show", "x", "--base-url", "http://127.0.0.1:9"], "does not answer"),
        (["ops", "--op", "nothing=torch"], "does not exist"),
        (["ops", "--op", "linear=nothing"], "no such backend"),
        (["activator"], "namespace is needed"),
        (["activator", "--namespace", "a", "--upstream", "http://x"], "upstream must hold {name}"),
        (["activator", "--namespace", "a", "--max-waiting", "0"], "--max-waiting must be >= 1"),
        (["activator", "--namespace", "a", "--max-held-size", "0"], "--max-held-size must be >= 1"),
        (["fetch", "ftp://org/repo", "--path", "."], "expected hf://"),
        (["fetch", "hf://a/b/c", "--path", "."], "uri must be hf://"),
        (["fetch", "s3://b/x", "--revision", "v1", "--path", "."], "--revision is for hf://"),
        (["fetch", "file:///x", "--revision", "v1", "--path", "."], "--revision is for downloads"),
        (["fetch", "file:///no/such", "--path", "/no/such"], "there is no such folder"),
        ([], "COMMAND"),
    ],
)
def test_what_cannot_be_honoured_is_one_line(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    code, shown = said(capsys, *args)
    assert code in (1, 2)
    assert message in shown
    assert "Traceback" not in shown


def test_a_missing_extra_is_named_when_the_command_is_called(capsys):
    plugin = EntryPoint(name="up", group="engram.commands", value="no_such_package.command:register")
    parser = build_parser([plugin])
    options = parser.parse_args(["up", "-f", "x.yaml"])
    with pytest.raises(CommandError, match=r"pip install 'engram-platform\[operator\]'"):
        options.func(options)


def test_a_missing_package_is_named_by_the_extra_that_brings_it():
    with pytest.raises(CommandError, match=r"needs the package 'no_such_package'.*\[runtime\]"):
        load("no_such_package.module:name", command="serve")
    with pytest.raises(ModuleNotFoundError):  # ours: a bug, not an extra
        load("engram_runtime.no_such_module:name", command="serve")


def test_the_library_names_the_extra_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.delitem(sys.modules, "engram_runtime.engine.llm", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"engram_runtime.LLM needs the package 'tqdm'.*\[runtime\]"):
        engram_runtime.LLM  # noqa: B018


def test_an_interrupt_while_commands_are_found_is_no_traceback(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["engram_runtime.cli.main"], "entry_points", interrupted)
    assert main(["ops"]) == 130


def test_plugins_add_commands(capsys):
    class Plugin:
        name = "hello"

        def load(self):
            def register(commands):
                commands.add_parser("hello").set_defaults(func=lambda options: 7)

            return register

    options = build_parser([Plugin()]).parse_args(["hello"])
    assert options.func(options) == 7


def test_ops_says_why(capsys):
    assert main(["ops", "--device", "cpu"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert {"linear", "paged_attention", "sample", "ssd_scan"} <= {row.split()[0] for row in rows}
    assert all(row.split()[1] == "torch" for row in rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4Gi", 4 << 30),
        ("500M", 500_000_000),
        ("4096", 4096),
        ("1.5Ki", 1536),
        ("1k", 1000),
        ("0", 0),
        ("2Ti", 2 << 40),
    ],
)
def test_sizes(text, expected):
    assert size(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("30d", 2592000.0), ("90", 90.0), ("1.5h", 5400.0), ("2w", 1209600.0)])
def test_times(text, expected):
    assert seconds(text) == expected


@pytest.mark.parametrize("parse", [size, seconds, override])
@pytest.mark.parametrize("text", ["", "x", "-1", "4 Gi x", "Gi", "1e9", "٣", "=torch", "op="])
def test_nonsense_is_refused(parse, text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse(text)


def test_sizes_are_shown_short():
    assert [show_size(count) for count in (12, 1536, 5 << 30, 3 << 41)] == ["12", "1.5Ki", "5.0Gi", "6.0Ti"]
