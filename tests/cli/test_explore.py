"""tg explore: what it serves and to whom, what it writes, what it walks and what it refuses."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from threshold_gating.show import explorer
from threshold_gating.show.explorer.server import ADDRESS, Server

NETWORK = "to_convert.py"


@pytest.fixture
def server():
    with Server(explorer.files(), 0) as made:
        running = threading.Thread(target=made.serve_forever, daemon=True)
        running.start()
        yield made
        made.shutdown()
        running.join()


def asked(server, path, method="GET", host=None):
    """(status, headers, body) of one request, its path as it is."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"{ADDRESS}:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_every_file_is_served_as_what_it_is(server):
    for name, content in explorer.files().items():
        status, headers, body = asked(server, f"/{name}")
        assert (status, body) == (200, content)
        kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}[name.split(".")[1]]
        assert headers["Content-Type"] == f"{kind}; charset=utf-8"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert asked(server, "/")[2] == asked(server, "/?a=b")[2] == explorer.files()[explorer.PAGE]
    status, headers, body = asked(server, "/gates.js", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == len(explorer.files()["gates.js"])


@pytest.mark.parametrize(
    "path",
    [
        *("/../__init__.py", "/__init__.py", "/..%2f__init__.py", "//etc/passwd", "/etc/passwd"),
        *("/%2e%2e/server.py", "/./gates.js", "/gates.js/", "/GATES.JS", "/favicon.ico"),
    ],
)
def test_nothing_else_is_served(server, path):
    assert asked(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_sent(server, method):
    assert asked(server, "/", method)[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "0.0.0.0:80"])
def test_another_name_for_this_machine_is_refused(server, host):
    assert asked(server, "/", host=host)[0] == 403


def test_this_machine_has_two_names(server):
    assert asked(server, "/", host=f"localhost:{server.server_address[1]}")[0] == 200


def test_it_listens_on_one_address_only(server):
    assert server.server_address[0] == "127.0.0.1"
    with socket.socket() as other:
        other.settimeout(2)
        assert other.connect_ex(("127.0.0.2", server.server_address[1])) != 0


@pytest.mark.parametrize(("error", "said"), [(BrokenPipeError(), False), (ValueError("odd"), True)])
def test_a_caller_that_leaves_is_no_error_to_print(capsys, error, said):
    with Server({"index.html": b""}, 0) as server:
        try:
            raise error
        except Exception:
            server.handle_error(None, (ADDRESS, 1))
    assert bool(capsys.readouterr().err) == said


@contextmanager
def heard():
    """Let programs begun here hear an interrupt: where these tests run behind a shell, none does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_serves_until_interrupted_and_ends_cleanly():
    words = [sys.executable, "-m", "threshold_gating", "explore", "--port", "0", "--json", "-"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with heard(), subprocess.Popen(words, **pipes) as process:
        try:
            assert "Ctrl-C ends" in process.stderr.readline()
            lines = iter(process.stdout.readline, "}\n")
            url = json.loads("".join(lines) + "}")["url"]
            port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", url)[1])
            connection = http.client.HTTPConnection(ADDRESS, port, timeout=10)
            connection.request("GET", "/")
            assert connection.getresponse().status == 200
            connection.close()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
            assert (process.returncode, out, err) == (0, "", "\nEnded.\n")
        finally:
            process.kill()  # or whoever fails here would wait for it
    with socket.socket() as gone:
        assert gone.connect_ex((ADDRESS, port)) != 0


# As it is typed


def known(folder):
    page = (folder / explorer.PAGE).read_text("utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_static_files_begin_with_the_activation_and_the_pair(tg, tmp_path):
    words = ("--preset", "gf180-weak", "--static", str(tmp_path / "out"))
    code, out, err = tg("explore", "nn.ReLU6", *words)
    assert (code, err) == (0, "")
    assert out == f"Written to {tmp_path / 'out' / 'index.html'}\n"
    data = known(tmp_path / "out")
    assert (data["start"], data["preset"], data["network"]) == ("relu6", "gf180-weak", None)


def test_a_network_is_converted_and_its_sites_are_in_the_page(folder, tg):
    words = ("--inputs", "5,4", "--static", "out", "--json", "-")
    code, out, err = tg("explore", "net.py:make_model", *words)
    assert code == 0
    report = json.loads(out)
    assert [site["name"] for site in report["sites"]] == ["act", ":tanh#0"]
    assert known(folder / "out")["network"]["sites"] == report["sites"]
    assert set(report["files"]) == {path.name for path in (folder / "out").iterdir()}
    assert "not certified here" in err
    assert "Inputs are random" in err


def test_what_a_network_with_some_gates_has_beside_them_is_converted(folder, tg):
    text = "import threshold_gating as tg\nfrom torch import nn\n\n\ndef make():\n"
    (folder / "some.py").write_text(
        text + "    return nn.Sequential(tg.Activation('silu'), nn.GELU())\n"
    )
    words = ("--inputs", "5,4", "--static", "out", "--json", "-")
    code, out, _ = tg("explore", "some.py:make", *words)
    assert code == 0
    found = [(site["name"], site["kind"]) for site in json.loads(out)["sites"]]
    assert found == [("0", "silu"), ("1", "gelu")]


def test_a_saved_network_is_walked_by_its_folder_or_its_config(folder, tg):
    assert tg("convert", "net.py:make_model", "--inputs", "5,4", "-o", "saved")[0] == 0
    for what in ("saved", "saved/tg_config.json"):
        assert tg("explore", what, "--static", "out")[0] == 0
        sites = known(folder / "out")["network"]["sites"]
        assert [(site["name"], site["kind"]) for site in sites] == [
            ("act", "relu"),
            (":tanh#0", "tanh"),
        ]


REFUSED = [
    (["--address", "0.0.0.0"], "served to this machine only, at 127.0.0.1; for others"),
    (["--address", "::"], "served to this machine only"),
    (["--address", "192.168.0.1"], "served to this machine only"),
    (["--port", "-1"], "--port must be from 0 (any that is free) to 65535; got -1."),
    (["--port", "65536"], "--port must be from 0"),
    (["--preset", "sky130-weka"], "no preset 'sky130-weka'; did you mean 'sky130-weak'?"),
    (["siluu"], "no activation 'siluu' in the taxonomy; did you mean 'silu'"),
    (["snake"], "'snake' has no instance"),
    (["gelu", "--pretrained"], "--pretrained is of a network"),
    (["gelu", "--inputs", "1,3"], "--inputs is of a network"),
    (["nowhere/saved"], "there is no nowhere/saved"),
    (["nowhere.json"], "there is no nowhere.json"),
    (["."], "tg_config.json cannot be read"),
    (["net.py"], "net.py is no tg_config.json"),
    (["net.py:missing", "--inputs", "1,4"], "missing"),
    (["gelu", "--static", "net.py"], "--static net.py is a file; give a folder"),
    (["gelu", "--static", "/proc/nowhere"], "cannot be written"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_cannot_be_had_is_refused_in_a_line(folder, tg, words, said):
    code, out, err = tg("explore", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_port_in_use_is_named_with_a_way_out(tg):
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = tg("explore", "--port", str(port))
    assert (code, out) == (2, "")
    said = f"port {port} is in use; give another --port, or 0 for any that is free."
    assert err == f"tg explore: {said}\n"


def test_damaged_and_empty_saved_networks_are_refused(folder, tg):
    assert tg("convert", "net.py:make_model", "--inputs", "5,4", "-o", "saved")[0] == 0
    config = folder / "saved" / "tg_config.json"
    whole = config.read_text()
    for text, said in [
        (whole[: len(whole) // 2], "is not valid JSON, so it is truncated or damaged"),
        (whole.replace('"theta"', '"thet"'), "unknown key 'thet'"),
        (json.dumps({**json.loads(whole), "modules": [], "owners": []}), "no site with a curve"),
    ]:
        config.write_text(text)
        code, out, err = tg("explore", "saved/tg_config.json", "--static", "out")
        assert (code, out) == (2, "")
        assert said in err
    assert not (folder / "out").exists()


def test_another_page_in_the_folder_stays(tg, tmp_path):
    page = tmp_path / "index.html"
    page.write_text("mine")
    code, _, err = tg("explore", "--static", str(tmp_path))
    assert code == 2
    assert "is another page and stays as it is; give another folder." in err
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    assert page.read_text() == "mine"
