"""`install` and `hosts`: they read the files of hosts and change single entries, and keep the rest of each file."""

from __future__ import annotations

import json
import os
import stat
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import SERVER, on_terminal

# The parts of the command line have no public API.
from trio_mcp.cli.edits import put_json, put_toml, read_json, toml_entry
from trio_mcp.cli.hosts import HOSTS, configuration_files, masked  # the same
from trio_mcp.cli.main import main  # the same
from trio_mcp.errors import UsageError

ENTRY = {"command": "python", "args": ["a b"]}
MAC = "darwin"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without hosts, and an empty folder to work in."""
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def user_file(host: str) -> Path:
    return configuration_files(HOSTS[host])[-1].path


def command_of(name: str) -> dict[str, Any]:
    return {"command": sys.executable, "args": ["-m", "trio_mcp", "run", name]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", '{\n  "servers": {\n    "new": {"command": "python", "args": ["a b"]}\n  }\n}\n'),
        ("{}", '{\n  "servers": {\n    "new": {"command": "python", "args": ["a b"]}\n  }\n}\n'),
        (
            '{\n\t"other": 1, // one\n\t// two\n}\n',
            '{\n\t"other": 1, // one\n\t// two\n\t"servers": {\n'
            '\t\t"new": {"command": "python", "args": ["a b"]}\n\t}\n}\n',
        ),
        (
            '{\n  "servers": {\n    "b": {}, /* c */\n    "a": {"url": "http://x//y"} // d\n  },\n  "z": [1,]\n}\n',
            '{\n  "servers": {\n    "b": {}, /* c */\n    "a": {"url": "http://x//y"}, // d\n'
            '    "new": {"command": "python", "args": ["a b"]}\n  },\n  "z": [1,]\n}\n',
        ),
        (
            '{\n  "servers": {\n    "new": {"old": [{"a": 1}]}, // kept\n    "z": {}\n  }\n}\n',
            '{\n  "servers": {\n    "new": {"command": "python", "args": ["a b"]}, // kept\n    "z": {}\n  }\n}\n',
        ),
        ("{\n  // none yet\n}",
         '{\n  // none yet\n  "servers": {\n    "new": {"command": "python", "args": ["a b"]}\n  }\n}'),
    ],
)  # fmt: skip
def test_an_entry_is_put_into_json(text: str, expected: str) -> None:
    changed = put_json(text, "servers", "new", ENTRY)
    unit = "\t" if "\t" in changed else "  "
    at = changed.index('"new": ') + len('"new": ')
    end = json.JSONDecoder().raw_decode(changed, at)[1]  # the entry has several lines; here they are joined
    assert changed[at:end].splitlines()[1] == f'{unit * 3}"command": "python",'
    assert changed[:at] + json.dumps(ENTRY) + changed[end:] == expected
    assert read_json(changed)["servers"]["new"] == ENTRY


def test_an_object_on_one_line_stays_json() -> None:
    assert read_json(put_json('{"servers": {"a": {}}, "b": {}}', "servers", "new", ENTRY)) == {
        "servers": {"a": {}, "new": ENTRY},
        "b": {},
    }


TOML = """\
# top
model = "x"

[mcp_servers.a]
command = "y" # kept

# about z
[z]
list = [
  "[mcp_servers.new]",
]
"""


def test_an_entry_is_put_into_toml() -> None:
    added = put_toml(TOML, "mcp_servers", "new", {**ENTRY, "env": {"A.B": 'q"\\\x7f'}})
    assert added == TOML + (
        '\n[mcp_servers.new]\ncommand = "python"\nargs = ["a b"]\n\n[mcp_servers.new.env]\n"A.B" = "q\\"\\\\\\u007f"\n'
    )
    assert tomllib.loads(added)["mcp_servers"]["new"]["env"] == {"A.B": 'q"\\\x7f'}
    assert put_toml(added, "mcp_servers", "new", ENTRY) == TOML + (
        '\n[mcp_servers.new]\ncommand = "python"\nargs = ["a b"]\n'
    )
    replaced = put_toml(TOML, "mcp_servers", "a", ENTRY)
    assert replaced == TOML.replace('command = "y" # kept\n', 'command = "python"\nargs = ["a b"]\n')


@pytest.mark.parametrize("text", ["mcp_servers = {}\n", "[mcp_servers]\nnew = {command = 'y'}\n"])
def test_toml_that_cannot_be_changed_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"in a form that cannot be changed here; edit the file by hand"):
        put_toml(text, "mcp_servers", "new", ENTRY)


@pytest.mark.parametrize("text", ["[]", '{"a" 1}', "{", "nonsense", '{"servers": {"a": 1}'])
def test_text_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        put_json(text, "servers", "new", ENTRY)


def test_each_host_has_its_file_on_each_system(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linux = {name: str(user_file(name).relative_to(home)) for name in HOSTS}
    monkeypatch.setattr(sys, "platform", MAC)
    mac = {name: str(user_file(name).relative_to(home)) for name in HOSTS}
    same = {
        "claude-code": ".claude.json",
        "cursor": ".cursor/mcp.json",
        "gemini": ".gemini/settings.json",
        "codex": ".codex/config.toml",
    }
    assert linux == {
        "claude-desktop": ".config/Claude/claude_desktop_config.json",
        "vscode": ".config/Code/User/mcp.json",
        **same,
    }
    folder = "Library/Application Support"
    assert mac == {
        "claude-desktop": f"{folder}/Claude/claude_desktop_config.json",
        "vscode": f"{folder}/Code/User/mcp.json",
        **same,
    }


@pytest.mark.parametrize("host", HOSTS)
def test_install_writes_the_form_of_the_host(host: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["install", SERVER, "--host", host, "--name", "weather", "--env", "API_KEY=abc123", "--yes"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert (err, "abc123" in out) == ("", False)
    file = user_file(host)
    text = file.read_text()
    servers = (tomllib.loads(text) if host == "codex" else json.loads(text))[HOSTS[host].key]
    expected = {**command_of(SERVER), "env": {"API_KEY": "abc123"}}
    assert servers == {"weather": {"type": "stdio", **expected} if HOSTS[host].typed else expected}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.name for each in file.parent.iterdir()] in (
        [file.name],
        [".claude.json", "work"],
        ["work", ".claude.json"],
    )
    assert main(arguments) == 0
    assert "already has this entry" in capsys.readouterr().out
    assert main([*arguments[:-1], "--env", "API_KEY=def456", "--yes"]) == 2
    assert "already has a server 'weather'; use --replace" in capsys.readouterr().err
    assert main(["list", "weather", "--env", f"PYTHONPATH={os.getcwd()}"]) == 0  # the name is a TARGET now
    assert capsys.readouterr().out.startswith("weather 1.0 ")


def test_a_url_is_written_in_the_form_of_the_host(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "https://example.com/mcp"
    for host in HOSTS:
        given = ["install", url, "--host", host, "--name", "far", "--header", "Authorization:Bearer abc123", "--yes"]
        assert main(given) == (2 if host == "claude-desktop" else 0)
    out, err = capsys.readouterr()
    assert "abc123" not in out
    assert err == "trio-mcp: the file of Claude Desktop takes commands only; add a URL under Settings, Connectors\n"
    headers = {"Authorization": "Bearer abc123"}
    for host in ("claude-code", "vscode"):
        entry = json.loads(user_file(host).read_text())[HOSTS[host].key]["far"]
        assert entry == {"type": "http", "url": url, "headers": headers}
    assert json.loads(user_file("cursor").read_text())["mcpServers"]["far"] == {"url": url, "headers": headers}
    assert json.loads(user_file("gemini").read_text())["mcpServers"]["far"] == {"httpUrl": url, "headers": headers}
    assert tomllib.loads(user_file("codex").read_text())["mcp_servers"]["far"] == {"url": url, "http_headers": headers}


def test_install_keeps_a_backup_permissions_and_links(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real, link = home / "dotfiles.json", user_file("cursor")
    before = '{"mcpServers": {"weather": {"command": "old", "env": {"API_KEY": "abc123"}}}}'
    real.write_text(before)
    real.chmod(0o640)
    link.parent.mkdir()
    link.symlink_to(real)
    given = ["install", SERVER, "--host", "cursor", "--name", "weather", "--env", "API_KEY=def456"]
    assert main([*given, "--replace", "--dry-run"]) == 0
    assert real.read_text() == before
    assert capsys.readouterr().out.splitlines() == [
        str(real),
        "   {",
        '     "mcpServers": {',
        '       "weather": {',
        '  -      "command": "old",',
        f'  +      "command": "{sys.executable}",',
        '  +      "args": [',
        '  +        "-m",',
        '  +        "trio_mcp",',
        '  +        "run",',
        f'  +        "{SERVER}"',
        "  +      ],",
        '         "env": {',
        '  -        "API_KEY": "***"',
        '  +        "API_KEY": "*** (changed)"',
        "         }",
        "       }",
        "     }",
        "   }",
        "Nothing was written (--dry-run).",
    ]
    assert main([*given, "--replace", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["done"], report["file"], report["entry"]["env"]) == ("replaced", str(real), {"API_KEY": "***"})
    assert link.is_symlink()
    assert json.loads(real.read_text())["mcpServers"]["weather"]["command"] == sys.executable
    backup = Path(report["backup"])
    assert backup.read_text() == before
    assert [stat.S_IMODE(each.stat().st_mode) for each in (real, backup)] == [0o640, 0o640]


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("cursor", '\ufeff{\r\n\t"mcpServers": {} // none\r\n}\r\n'),
        ("codex", '# mine\r\nmodel = "x"\r\n'),
    ],
)
def test_install_keeps_the_ends_of_lines_and_the_mark_of_a_file(host: str, text: str, home: Path) -> None:
    file = user_file(host)
    file.parent.mkdir(parents=True)
    file.write_bytes(text.encode())
    arguments = ["install", "--host", host, "--name", "a", "--yes", "--", "sh", "-c", "exit"]
    assert main(arguments) == 0
    written = file.read_bytes()
    assert written.count(b"\n") == written.count(b"\r\n") > 4
    assert written.startswith(text.encode()[:9])
    (backup,) = file.parent.glob("*.backup")
    assert backup.read_bytes() == text.encode()


def test_a_broken_file_is_named_with_its_line(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = user_file("cursor")
    file.parent.mkdir()
    file.write_text(text := '{\n  // mine\n  "a": 1,\n  "b" 2\n}\n')
    assert main(["install", "--host", "cursor", "--name", "a", "--yes", "--", "sh"]) == 2
    assert "cannot be read: line 4: Expecting ':' delimiter" in capsys.readouterr().err
    assert file.read_text() == text


def test_install_makes_paths_absolute(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(SERVER).read_text()
    for name in ("weather.py", "forecasts.py"):
        Path(name).write_text(source)
    Path("data").mkdir()
    cases: Sequence[tuple[list[str], str, list[str], dict[str, str] | None]] = [
        (["weather.py:server"], "weather", ["-m", "trio_mcp", "run", f"{home}/work/weather.py:server"], None),
        (["forecasts:server"], "forecasts", ["-m", "trio_mcp", "run", "forecasts:server"],
         {"PYTHONPATH": f"{home}/work"}),
        (["--name", "mine", "--", sys.executable, "weather.py", "./data", "data", "-x.py"], "mine",
         [f"{home}/work/weather.py", f"{home}/work/data", "data", "-x.py"], None),
        (["--name", "tapped", "--", sys.executable, "-m", "trio_mcp", "tap", "-o", "talk", "weather.py"], "tapped",
         ["-m", "trio_mcp", "tap", "-o", f"{home}/work/talk", f"{home}/work/weather.py"], None),
        (["--name", "shell", "--", "sh", "-c", "exit"], "shell", ["-c", "exit"], None),
    ]  # fmt: skip
    for given, name, expected, env in cases:
        assert main(["install", "--host", "cursor", "--project", "--yes", *given]) == 0
        entry = json.loads(Path(".cursor/mcp.json").read_text())["mcpServers"][name]
        assert (entry["args"], entry.get("env"), Path(entry["command"]).is_absolute()) == (expected, env, True)
    assert "does not start as a host would start it" in capsys.readouterr().err  # of the shell


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.py", "--host", "cursor"], "there is no file absent.py"),
        (["--host", "cursor", "--", "sh"], "give the server a name: --name NAME"),
        (["--host", "cursor", "--name", "a", "--", "no-such-program"], "there is no program 'no-such-program'"),
        (["--host", "cursor", "--name", "a b", "--", "sh"], "--name must have 1 to 64 letters, digits"),
        (
            ["https://x", "--host", "cursor", "--name", "a", "--header", "x"],
            "an option must be like --header NAME:VALUE\n",
        ),
        (["--host", "cursor", "--name", "a", "--header", "x:y", "--", "sh"], "--header needs a URL as TARGET"),
        (["wss://x", "--host", "cursor", "--name", "a"], "hosts connect to http and https URLs only, got wss"),
        (["https://x", "--host", "claude-desktop", "--project"], "Claude Desktop has no file for a project"),
        (["https://x", "--host", "cursor", "--name", "a"], "standard input is not a terminal"),
    ],
)  # fmt: skip
def test_wrong_arguments_write_nothing(
    arguments: list[str], message: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"trio-mcp: {message}")
    assert [each.name for each in home.iterdir()] == ["work"]


def test_install_asks_on_a_terminal(home: Path) -> None:
    arguments = ("install", SERVER, "--host", "cursor", "--name", "weather")
    shown, status = on_terminal(arguments, [("Write this? [y/N]", "\n")])
    assert (status, "Nothing was written." in shown) == (1, True)
    assert not user_file("cursor").exists()
    shown, status = on_terminal(arguments, [("Write this? [y/N]", "y\n")])
    assert (status, shown.splitlines()[-1]) == (0, "Restart Cursor, or reload its servers.")
    assert "\x1b[32m+" in shown
    assert user_file("cursor").exists()


def test_hosts_shows_servers_without_secrets(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(".mcp.json").write_text('{"mcpServers": {"far": {"type": "http", "url": "https://u:abc@x/mcp?key=abc123"}}}')
    local = {
        "mcpServers": {"mine": {"command": "npx", "args": ["-y", "pkg", "--api-key", "abc123"], "env": {"K": "abc123"}}}
    }
    (home / ".claude.json").write_text(json.dumps({"projects": {str(Path.cwd()): local}, "mcpServers": {}}))
    user_file("codex").parent.mkdir()
    user_file("codex").write_text(
        "[mcp_servers.a]\nurl = 'https://x'\nenabled = false\nhttp_headers = {A = 'abc123'}\n"
    )
    user_file("gemini").parent.mkdir()
    assert main(["hosts"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Claude Desktop  claude-desktop  not found",
        "Claude Code  claude-code",
        f"  {home}/work/.mcp.json",
        "    far  https://***@x/mcp?key=***",
        f"  {home}/.claude.json",
        "    mine  npx -y pkg --api-key ***  (env: K)",
        "VS Code  vscode  not found",
        "Cursor  cursor  not found",
        "Gemini CLI  gemini",
        "Codex  codex",
        f"  {home}/.codex/config.toml",
        "    a  https://x  (http_headers: A)  (disabled)",
    ]
    user_file("cursor").parent.mkdir()
    user_file("cursor").write_text("{")
    assert main(["hosts", "--json"]) == 1
    found = {each["host"]: each for each in json.loads(capsys.readouterr().out)["hosts"]}
    assert found["cursor"]["files"][0]["error"].startswith(f"{home}/.cursor/mcp.json cannot be read: ")
    assert found["claude-code"]["files"][1]["servers"]["mine"]["env"] == {"K": "***"}
    assert "abc123" not in json.dumps(found)


def test_arguments_that_look_like_secrets_are_hidden() -> None:
    arguments = ["--token", "a", "--auth=b", "--header", "Authorization: c", "API_KEY=d", "--port", "3000", "C:/x"]
    assert masked({"args": arguments})["args"] == [
        "--token", "***", "--auth=***", "--header", "Authorization: ***", "API_KEY=***", "--port", "3000", "C:/x",
    ]  # fmt: skip


def test_a_table_of_toml_quotes_names() -> None:
    text = toml_entry("mcp_servers", "a b", {"command": "ü"})
    assert text == '[mcp_servers."a b"]\ncommand = "ü"\n'
    assert tomllib.loads(text) == {"mcp_servers": {"a b": {"command": "ü"}}}
