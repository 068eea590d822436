"""CUDA C++ to PTX by NVIDIA's run-time compiler, without a GPU or a toolkit: ptxas takes nothing but PTX.

    python nvrtc.py LIBRARY SOURCE PTX [OPTION...]

A program of its own, because a compiler may take its process with it. Its exit status is 1 when the code was refused;
what the compiler said goes to stderr.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def ptx(library: str, source: Path, options: Sequence[str]) -> tuple[bytes, str]:
    """(PTX, what the compiler said) of a file; the PTX is empty when it was refused. Raises OSError for a library
    that cannot be loaded."""
    for builtins in sorted(Path(library).parent.glob("libnvrtc-builtins.so.*")):  # it looks for them in no other way
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    rtc = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    text, name = source.read_bytes(), source.name.encode()
    if status := rtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None):
        return b"", f"nvrtc: error {status} before anything was compiled"
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = rtc.nvrtcCompileProgram(program, len(options), given)
    said = _text(rtc.nvrtcGetProgramLogSize, rtc.nvrtcGetProgramLog, program).decode("utf-8", "replace")
    if status:
        return b"", said or f"nvrtc: error {status}"
    return _text(rtc.nvrtcGetPTXSize, rtc.nvrtcGetPTX, program), said


def _text(size_of: Callable[..., int], text_of: Callable[..., int], program: Any) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(max(1, size.value))
    text_of(program, text)
    return text.value


def main(arguments: Sequence[str]) -> int:
    library, source, result, *options = arguments
    try:
        made, said = ptx(library, Path(source), options)
    except (OSError, AttributeError) as error:
        made, said = b"", f"nvrtc: error: {library}: {error}"
    print(said, file=sys.stderr)
    Path(result).write_bytes(made)
    return 0 if made else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
