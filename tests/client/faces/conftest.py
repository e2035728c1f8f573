"""The face of a story, which a coroutine that is a test is run with."""

from __future__ import annotations

import inspect

import pytest

from tests.client.faces.face import AioFace, Face, TwistedFace


@pytest.fixture(params=["blocking", "aio", "twisted"])
def face(request: pytest.FixtureRequest) -> Face:
    if request.param == "twisted":
        return TwistedFace(request.getfixturevalue("reactor"))
    return Face() if request.param == "blocking" else AioFace()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    face = pyfuncitem.funcargs["face"]
    assert isinstance(face, Face)
    face.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
