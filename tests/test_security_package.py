"""Nothing in the package runs, loads or opens what a peer says: read from its code, exceptions reasoned."""

from __future__ import annotations

import ast

import pytest

from tests.package_code import calls_in, imports_in, parse_package

TREES = parse_package()
CALLS = [call for module, tree in TREES.items() for call in calls_in(module, tree)]

FORBIDDEN_MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle",
}  # fmt: skip
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {
    "torch.load", "torch.save", "np.load", "numpy.load", "os.system", "os.popen", "yaml.load",
    "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "runpy.run_path", "runpy.run_module",
}  # fmt: skip
# Methods that pickle what they send, of pyzmq and of torch.distributed.
FORBIDDEN_METHODS = {
    "send_pyobj", "recv_pyobj", "all_gather_object", "gather_object", "broadcast_object_list",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip

PICKLING_PIPES = {
    "weightsync.testing.ranks": "anonymous pipes to the child processes of a conformance test",
    "weightsync.benchmarking.crew": "anonymous pipes to the child processes of a benchmark",
    "weightsync.drills.actors": "anonymous pipes to the child processes of a drill",
}
IMPORTS_BY_NAME = {
    "weightsync.class_paths": "the class that the configuration names, on the driver's word",
    "weightsync.capacity": "torch_npu",
    "weightsync.engines.buffers": "cupy",
    "weightsync.engines.collective_backends": "torch_npu",
    "weightsync.cli.app": "the package's own commands, from a table in it",
    "weightsync.cli.demo": "the package's own example",
}
SOCKETS = {
    "weightsync.control.addresses": "asks the routing table, and tries whether something listens",
    "weightsync.engines.collective_meeting": "the port that is reserved for torch's store",
}
# What the rooms that hear peers open. The names come from this process, or are made of whole numbers.
FILES = {
    "weightsync.engines.shared_memory:Home.here": "what the kernel says of this process",
    "weightsync.engines.shared_memory:_open": (
        "/proc/<number>/fd/<number>, opened only where the kernel says that it is a memory of weightsync's"
    ),
    "weightsync.engines.shared_memory:_is_block": "the same, to see what it is",
    "weightsync.engines.buffers:allocate_host": "no file: anonymous memory",
}
OPENING = {"open", "os.open", "Path", "os.readlink", "os.listdir", "os.scandir", "mmap.mmap", "os.unlink"}


def test_no_module_that_runs_what_it_reads_is_imported():
    found = {
        module: name
        for module, tree in TREES.items()
        for name in imports_in(tree)
        if name.split(".")[0] in FORBIDDEN_MODULES
    }
    assert found == {}


def test_nothing_evaluates_loads_or_unpickles():
    found = [
        str(call)
        for call in CALLS
        if call.name in FORBIDDEN_BUILTINS | FORBIDDEN_CALLS or call.method in FORBIDDEN_METHODS
    ]
    assert found == []


def test_no_command_goes_through_a_shell():
    assert [str(call) for call in CALLS if call.keyword("shell") is not None] == []


def test_pickling_pipes_are_used_only_between_a_test_and_its_children():
    users = {
        module for module, tree in TREES.items() for name in imports_in(tree) if is_pickling_channel(name)
    }
    assert users <= set(PICKLING_PIPES), users


def is_pickling_channel(name: str) -> bool:
    return name.startswith(("multiprocessing", "torch.multiprocessing")) and "shared_memory" not in name


def test_modules_are_imported_by_name_only_where_the_name_is_the_users_own():
    assert {call.module for call in CALLS if call.method == "import_module"} == set(IMPORTS_BY_NAME)


def test_only_the_control_channel_has_sockets_of_its_own():
    zmq = {module for module, tree in TREES.items() if any(n.startswith("zmq") for n in imports_in(tree))}
    assert all(module.startswith("weightsync.control.") for module in zmq), zmq
    makers = {"socket.socket", "socket.create_server", "socket.create_connection", "socket.socketpair"}
    assert {call.module for call in CALLS if call.name in makers} == set(SOCKETS)


def test_every_zmq_socket_is_made_in_one_file_and_limited_at_once():
    made = [call for call in CALLS if call.method == "socket" and "context" in call.name]
    assert {call.where for call in made} == {
        "weightsync.control.wires:Gatekeeper.__init__",  # inproc: no peer reaches it
        "weightsync.control.wires:ServerSocket.__init__",
        "weightsync.control.wires:ClientWire.__init__",
    }
    limited = {call.where for call in CALLS if call.name == "_limit"}
    assert limited == {call.where for call in made if "Gatekeeper" not in call.where}


@pytest.mark.parametrize("room", ["weightsync.control", "weightsync.engines"])
def test_rooms_that_hear_peers_open_no_file_that_a_peer_names(room):
    opened = {
        call.where
        for call in CALLS
        if call.module.startswith(room)
        and (call.name in OPENING or call.method in {"read_text", "read_bytes"})
    }
    assert opened <= set(FILES), opened - set(FILES)


def test_decoders_of_what_peers_say_all_have_a_type():
    """Untyped msgpack or JSON would make whatever the peer wishes."""
    untyped = [
        str(call)
        for call in CALLS
        if call.module.startswith(("weightsync.control", "weightsync.engines"))
        and call.method in {"decode", "convert", "Decoder"}
        and "msgspec" in call.name
        and len(call.node.args) < (1 if call.method == "Decoder" else 2)
        and call.keyword("type") is None
    ]
    assert untyped == []


def test_run_time_checks_are_no_asserts():
    found = [
        f"{module} line {node.lineno}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert found == []
