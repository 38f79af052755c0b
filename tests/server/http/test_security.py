"""Vulnerabilities of other servers that must not appear here with a later change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "headrace"
FILES = sorted(SOURCE.rglob("*.py"))

# Each runs code, or trusts bytes, from elsewhere.
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "zmq", "telnetlib"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__"),
    *("torch.load", "torch.hub.load", "numpy.load", "np.load", "os.system", "os.popen", "yaml.load"),
    *("runpy.run_path", "runpy.run_module", "urllib.request.urlopen", "requests.get"),
}
FORBIDDEN_KEYWORDS = {"trust_remote_code", "allow_pickle", "weights_only", "shell"}


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] in FORBIDDEN_MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN_MODULES:
                yield module
            case ast.Call(func=func, keywords=keywords):
                if ast.unparse(func) in FORBIDDEN_CALLS:
                    yield ast.unparse(func)
                for keyword in keywords:
                    if keyword.arg in FORBIDDEN_KEYWORDS and ast.unparse(keyword.value) != "False":
                        yield str(keyword.arg)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("torch.load(path, weights_only=True)", "torch.load"),
        ("AutoModel.from_pretrained(name, trust_remote_code=True)", "trust_remote_code"),
        ("AutoModel.from_pretrained(name, trust_remote_code=given)", "trust_remote_code"),
        ("eval(text)", "eval"),
        ("subprocess.run(command, shell=True)", "shell"),
        ("np.load(file, allow_pickle=True)", "np.load"),
    ],
)
def test_the_scan_finds_forbidden_code(code: str, fault: str) -> None:
    assert fault in set(faults(ast.parse(code)))


def test_the_source_runs_no_code_from_elsewhere() -> None:
    """CVE-2025-32444, -62164, -24357, CVE-2026-22807, -27893: pickle between processes, torch.load, remote code."""
    assert len(FILES) > 100
    found = {(str(path.relative_to(SOURCE)), fault) for path in FILES for fault in faults(ast.parse(path.read_text()))}
    assert found == set()


def test_the_server_fetches_no_url_of_a_client() -> None:
    """CVE-2025-6242, CVE-2026-0599: a URL in a prompt was fetched."""
    clients = ("urllib.request", "requests", "httpx", "aiohttp", "http.client", "huggingface_hub")
    for path in (SOURCE / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith(clients)], path


def test_the_gate_reads_neither_the_host_header_nor_the_url() -> None:
    """CVE-2026-48746. The gate reads neither."""
    gate = (SOURCE / "server" / "http" / "gate.py").read_text()
    code = ast.unparse(ast.parse(gate)).lower()
    assert "b'host'" not in code and "raw_path" not in code and "scope['server']" not in code


def test_the_server_uses_the_parser_with_limits() -> None:
    """CVE-2025-48956: the limits belonged to a parser that was not in use."""
    from headrace.server.http.lifecycle import uvicorn_config
    from headrace.server.http.protocol import GuardedProtocol
    from headrace.server.options import ServerOptions

    async def app(scope: object, receive: object, send: object) -> None: ...

    config = uvicorn_config(app, ServerOptions(), lambda reason: None)
    assert issubclass(config.http_protocol_class, GuardedProtocol)  # type: ignore[arg-type]
    assert config.ws_protocol_class is None and not config.proxy_headers and not config.access_log
