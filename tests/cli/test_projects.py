"""`new` makes a project that works, and `completion` completes in a real bash, zsh and fish."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.in_process import ROOT, run
from tests.peers.installed import needs, tool

# The command line has no public API.
from trio_mcp.cli.main import COMMANDS, main

SHELLS = ("bash", "zsh", "fish")


def test_new_makes_a_project_whose_tests_pass(tmp_path: Path) -> None:
    made = run("new", "my-notes", cwd=tmp_path)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith("my-notes/ has server.py, test_server.py, .mcp.json, README.md.  Next:\n")
    folder = tmp_path / "my-notes"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(folder)]
    shown = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert "3 passed" in shown.stdout, shown.stdout
    entry = json.loads((folder / ".mcp.json").read_text())["mcpServers"]["my-notes"]
    assert entry == {"command": sys.executable, "args": [str(folder / "server.py")]}
    found = run("call", "my-notes", "find", "word=milk", "--quiet", "--env", f"PYTHONPATH={ROOT}", cwd=folder)
    assert (found.stdout, found.stderr) == ('["milk"]\n', "")
    readme = (folder / "README.md").read_text()
    commands = re.findall(r"^trio-mcp (.*?)(?: +#.*)?$", readme, re.MULTILINE)
    assert commands[:3] == ["list server.py", "call server.py find word=milk", "check server.py"]
    assert run(*commands[2].split(), cwd=folder).returncode == 0
    assert "@" not in "".join((folder / name).read_text() for name in ("README.md", "test_server.py"))


def test_new_refuses_an_existing_folder_and_bad_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert main(["new", "here", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(tmp_path / "here")
    assert main(["new", "here"]) == 2
    assert capsys.readouterr().err == "trio-mcp: here exists already; choose another name\n"
    assert main(["new", "two words"]) == 2
    assert capsys.readouterr().err.startswith("trio-mcp: a name begins with a letter")
    Path("file").touch()
    assert main(["new", "file/a"]) == 2
    assert capsys.readouterr().err.startswith("trio-mcp: file/a cannot be written: ")


def test_the_completion_may_be_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 0
    script = capsys.readouterr().out
    assert main(["completion", "fish", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"shell": "fish", "script": script}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_has_all_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", text) for name in COMMANDS)
    for option in ("header", "dry-run", "strict"):
        assert (f"-l {option} " if shell == "fish" else f"--{option}") in text
    assert "claude-desktop claude-code vscode cursor gemini codex" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


TYPED = [
    ("ch", "check"),
    ("install weather.py --ho", "--host"),
    ("install weather.py --host c", "claude-code claude-desktop codex cursor"),
    ("completion z", "zsh"),
    ("list wea", "weather.py"),
    ("call weather.py --q", "--quiet"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weather.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        *TYPED,
        ("", " ".join(sorted([*COMMANDS, "--help", "--version"]))),
        ("list --config wea", "weather.py"),
        ("list -- true --h", ""),
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(typed: str, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    words = [*typed.split(), ""] if typed.endswith(" ") or not typed else typed.split()
    script = (
        capsys.readouterr().out
        + '\nCOMP_WORDS=(trio-mcp "$@"); COMP_CWORD=$#; _trio_mcp; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    command = ["bash", "--norc", "-c", script, "bash", *words]
    shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert (" ".join(sorted(shown.stdout.split())), shown.stderr) == (expected, "")


@pytest.mark.parametrize(("typed", "expected"), [*TYPED, ("", " ".join(sorted(COMMANDS)))])
@pytest.mark.full
def test_fish_completes(typed: str, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fish = needs("fish", lambda: tool("fish"))
    assert main(["completion", "fish"]) == 0
    script = capsys.readouterr().out + f"\ncomplete -C 'trio-mcp {typed}'\n"
    command = [fish, "--no-config", "-c", script]
    environ = {**os.environ, "HOME": str(folder)}
    shown = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    assert (" ".join(sorted(line.split("\t")[0] for line in shown.stdout.splitlines())), shown.stderr) == (expected, "")


# An interactive shell without a prompt, which prints each completion instead of a menu.
ZSH = """\
PROMPT=
autoload -Uz compinit
compinit -D -u
source $HOME/completion
zstyle ':completion:*' insert-tab false
compadd() {
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\\ * ]]; then
        builtin compadd "$@"
        return
    fi
    local -a hits
    builtin compadd -A hits "$@"
    (( $#hits )) && print -rl -- "hit "$^hits
}
finished() { print -- finished }
comppostfuncs=(finished)
bindkey '^I' complete-word
print -- ready
"""


@pytest.mark.parametrize(("typed", "expected"), [*TYPED, ("", " ".join(sorted(COMMANDS)))])
@pytest.mark.full
def test_zsh_completes(typed: str, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zsh = needs("zsh", lambda: tool("zsh"))
    assert main(["completion", "zsh"]) == 0
    (folder / "completion").write_text(capsys.readouterr().out)
    (folder / "rc").write_text(ZSH)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(zsh, ["zsh", "-f", "-i"], {**os.environ, "HOME": str(folder), "TERM": "dumb"})
    os.write(terminal, b"source ~/rc\n")
    read_until(terminal, "\r\nready")
    os.write(terminal, f"trio-mcp {typed}\t".encode())
    shown = read_until(terminal, "finished\r\n")
    os.close(terminal)
    os.waitpid(pid, 0)
    assert " ".join(sorted(re.findall(r"hit (\S+)", shown))) == expected


def read_until(terminal: int, end: str) -> str:
    seen = ""
    while end not in seen:
        seen += os.read(terminal, 65536).decode()
    return seen
