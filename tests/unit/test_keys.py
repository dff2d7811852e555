"""Lock keys: the same work has the same key, other work has another, and a value without a stable form has none."""

from __future__ import annotations

import collections
import functools
import inspect
import json
import math
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from hypothesis import assume, example, given
from hypothesis import strategies as st
from kombu.serialization import dumps, loads

from celery_singleton_lock import ConfigurationError, LockKeyError, SingletonTask
from celery_singleton_lock.config.task_config import refuse_wrong
from celery_singleton_lock.keys.arguments import Parameters
from celery_singleton_lock.keys.builder import KeyBuilder
from celery_singleton_lock.keys.canonical import canonical, digest, escaped
from tests.unit.conftest import MakeApp


class Colour(Enum):
    RED = "red"
    NONE = None
    DEEP = ("a", 1)


class Level(IntEnum):
    LOW = 1


class Mode(str, Enum):
    FAST = "fast"


class Opaque:
    """Has an address in its repr, as most objects have."""


Point = collections.namedtuple("Point", "x y")


def builder(function: Callable[..., Any], unique_on: Any = None, lock_key: Any = None) -> KeyBuilder:
    """The key builder of a task with this body."""
    return KeyBuilder(Parameters(inspect.signature(function)), unique_on, lock_key)


def key_of(function: Callable[..., Any], *args: Any, unique_on: Any = None, lock_key: Any = None, **kwargs: Any) -> str:
    """The digest of a call of this function."""
    return digest(builder(function, unique_on, lock_key).canonical_call(args, kwargs))


def of_value(value: Any) -> str:
    """The digest of a call with this one argument."""
    return key_of(lambda value: None, value)


def through(serializer: str, value: Any) -> Any:
    """What a worker receives when this value was published."""
    content_type, encoding, body = dumps(value, serializer=serializer)
    return loads(body, content_type, encoding, accept={content_type})


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
zones = st.sampled_from([None, timezone.utc, timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(seconds=-7))])
in_json = st.one_of(
    plain,
    st.binary(max_size=8),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.datetimes(timezones=zones),
    st.dates(),
    st.times(timezones=zones),
)
in_pickle = st.one_of(in_json, st.timedeltas(), st.sampled_from([*Colour, *Level, *Mode]))
dict_keys = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.integers(-9, 9), st.none(), st.booleans()
)


def nested(leaves: st.SearchStrategy[Any], more: bool = False) -> st.SearchStrategy[Any]:
    """Leaves in lists, tuples and dicts, and in what JSON cannot say, too."""

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        kinds = [
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(dict_keys, inner, max_size=3).filter(lambda d: d.keys() != {"__type__", "__value__"}),
        ]
        if more:
            hashable = st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.uuids())
            kinds += [st.sets(hashable, max_size=3), st.frozensets(hashable, max_size=3)]
        return st.one_of(kinds)

    return st.recursive(leaves, grow, max_leaves=8)


arguments = st.tuples(
    st.lists(nested(in_json), max_size=3), st.dictionaries(st.sampled_from("pqr"), nested(in_json), max_size=3)
)


@given(arguments)
def test_key_survives_json(call: tuple[list[Any], dict[str, Any]]) -> None:
    """The key is the same before a message is written as JSON and after it is read."""
    args, kwargs = call
    received_args, received_kwargs = through("json", [args, kwargs])

    def run(*a: Any, **k: Any) -> None: ...

    assert key_of(run, *args, **kwargs) == key_of(run, *received_args, **received_kwargs)


@given(
    st.lists(nested(in_pickle, more=True), max_size=3),
    st.dictionaries(st.sampled_from("pqr"), nested(in_pickle, more=True), max_size=2),
)
def test_key_survives_pickle(args: list[Any], kwargs: dict[str, Any]) -> None:
    """The key is the same before a message is pickled and after it is unpickled."""
    received_args, received_kwargs = through("pickle", [args, kwargs])

    def run(*a: Any, **k: Any) -> None: ...

    assert key_of(run, *args, **kwargs) == key_of(run, *received_args, **received_kwargs)


@given(nested(plain))
def test_key_is_that_of_its_json_spelling(value: Any) -> None:
    """Tuples, and dict keys that are numbers, None or booleans, give the key of what plain JSON makes of them."""
    assert of_value(value) == of_value(json.loads(json.dumps(value)))


def json_spelling(value: Any) -> Any:
    """A value that is equal for two arguments exactly where JSON itself merges them; types are kept apart."""
    if isinstance(value, Enum):
        return json_spelling(value.value)
    if isinstance(value, (list, tuple)):
        return ("list", tuple(json_spelling(item) for item in value))
    if isinstance(value, dict):
        spelled = json.loads(json.dumps({key: str(index) for index, key in enumerate(value)}))
        values = list(value.values())
        return ("dict", frozenset((key, json_spelling(values[int(index)])) for key, index in spelled.items()))
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(json_spelling(item) for item in value))
    if isinstance(value, (Decimal, float)):
        return (type(value).__name__, str(value))
    if isinstance(value, (datetime, time)):
        return (type(value).__name__, value.isoformat())
    return (type(value).__name__, value)


@given(nested(in_pickle, more=True), nested(in_pickle, more=True))
@example(1, "1")
@example(None, "None")
@example(None, "null")
@example(True, 1)
@example(False, 0)
@example(1, 1.0)
@example(["x:y", "z"], ["x", "y:z"])
@example(["a", "b"], ["a,b"])
@example([["a"], "b"], [["a", "b"]])
@example([], {})
@example([], None)
@example("", None)
@example(b"a", "a")
@example(b"a", ["bytes", "61"])
@example(["list", 1], [1])
@example(UUID(int=1), str(UUID(int=1)))
@example(Decimal("1"), "1")
@example(Decimal("1.0"), 1.0)
@example(Decimal("1.0"), Decimal("1.00"))
@example(date(2020, 1, 1), "2020-01-01")
@example(date(2020, 1, 1), datetime(2020, 1, 1))
@example(datetime(2020, 1, 1), datetime(2020, 1, 1, tzinfo=timezone.utc))
@example(timedelta(1), timedelta(seconds=1))
@example({1, 2}, [1, 2])
@example({"a": 1}, [["a", 1]])
@example({"a": {"b": 1}}, {"a": "b"})
@example(0.0, -0.0)
@example("a\x00", "a")
def test_keys_are_equal_just_where_json_merges(one: Any, other: Any) -> None:
    """Two values have the same key exactly where JSON merges them; values of different types stay apart."""
    assert (json_spelling(one) == json_spelling(other)) == (of_value(one) == of_value(other))


@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_argument_boundaries_count(one: list[str], other: list[str]) -> None:
    """Arguments are never joined: other boundaries are other calls."""

    def run(*values: str) -> None: ...

    assert (one == other) == (key_of(run, *one) == key_of(run, *other))


def spelled(a: int, b: Any = 2, *, c: Any = None, d: str = "x") -> None: ...


@given(st.integers(), st.one_of(st.just(2), st.integers()), st.one_of(st.none(), st.text(max_size=2)), st.randoms())
def test_spellings_of_a_call_have_one_key(a: int, b: int, c: Any, random: Any) -> None:
    """Positional, by keyword in any order, defaults written out or left out: the same call has the same key."""
    named = {"a": a, "b": b, "c": c, "d": "x"}
    full = key_of(spelled, **named)
    order = list(named)
    random.shuffle(order)
    assert full == key_of(spelled, **{name: named[name] for name in order})
    assert full == key_of(spelled, a, b, c=c)
    assert full == key_of(spelled, a, c=c, b=b, d="x")
    if b == 2:
        assert full == key_of(spelled, a, c=c)
    if b == 2 and c is None:
        assert full == key_of(spelled, a)


@given(st.dictionaries(st.text(max_size=3), st.integers(), max_size=4), st.randoms())
def test_dict_and_keyword_order_do_not_count(values: dict[str, int], random: Any) -> None:
    """The order of a dict's items and of extra keywords does not count."""
    items = list(values.items())
    random.shuffle(items)

    def run(**extra: Any) -> None: ...

    assert of_value(values) == of_value(dict(items))
    assert key_of(run, **values) == key_of(run, **dict(items))


def test_extra_positionals_count() -> None:
    """What goes into ``*args`` and ``**kwargs`` is part of the lock key."""

    def run(a: Any, *args: Any, **kwargs: Any) -> None: ...

    calls = [((1,), {}), ((1, 2), {}), ((1, 2, 3), {}), ((1,), {"x": 2}), ((1, 2), {"x": 2}), ((1, [2, 3]), {})]
    assert len(calls) == len({key_of(run, *args, **kwargs) for args, kwargs in calls})
    assert key_of(run, 1) == key_of(run, a=1)


def test_default_has_a_type() -> None:
    """A default is left out only where the argument has its type, too: True is not 1, 2.0 is not 2."""

    def run(a: Any = 1, b: Any = None) -> None: ...

    assert 4 == len({key_of(run), key_of(run, True), key_of(run, 1.0), key_of(run, b=False)})


ODD = [0, 1, 2**70, False, True, 0.0, -0.0, 1.0, math.nan, math.inf, 1e300, "", "1", None, "\U0001f600", "\ud83d\ude00"]


@given(st.one_of(plain, st.sampled_from(ODD)), st.one_of(plain, st.sampled_from(ODD)))
@example("\U0001f600", "\ud83d\ude00")
@example(math.nan, math.nan)
@example(0.0, -0.0)
def test_default_is_what_is_written_alike(default: Any, value: Any) -> None:
    """A plain argument counts unless JSON writes it as the default: NaN is NaN, -0.0 not 0.0, a pair of surrogates its letter."""

    def run(a: Any = default) -> None: ...

    assert (key_of(run) == key_of(run, value)) == (json.dumps(default) == json.dumps(value))


def test_added_default_parameter_keeps_keys() -> None:
    """A new parameter with a default changes no key, so old and new workers agree during a deployment."""

    def old(a: Any) -> None: ...
    def new(a: Any, b: Any = "x", *, c: Any = ()) -> None: ...

    assert key_of(old, 1) == key_of(new, 1) == key_of(new, 1, "x", c=[])
    assert key_of(old, 1) != key_of(new, 1, "y")


def test_default_without_stable_form_is_no_obstacle() -> None:
    """A default without a stable form does no harm while it is not passed."""

    def run(a: int, session: Any = Opaque()) -> None: ...  # noqa: B008

    assert key_of(run, 1) == key_of(run, a=1)
    with pytest.raises(LockKeyError, match="session"):
        key_of(run, 1, Opaque())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        (Point(1, 2), (1, 2)),
        ({1: "a"}, {"1": "a"}),
        ({None: 1}, {"null": 1}),
        ({True: 1}, {"true": 1}),
        ({1.5: 1}, {"1.5": 1}),
        ({Level.LOW: 1}, {"1": 1}),
        ({Mode.FAST: 1}, {"fast": 1}),
        (Colour.RED, "red"),
        (Colour.NONE, None),
        (Colour.DEEP, ["a", 1]),
        (Level.LOW, 1),
        (Mode.FAST, "fast"),
        ({1, 2, 3}, frozenset([3, 2, 1])),
        ({"b", "a"}, {"a", "b"}),
        (collections.OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (((), ((1,),)), [[], [[1]]]),
    ],
)
def test_same_by_promise(one: Any, other: Any) -> None:
    """Tuples are lists, Enums their values, sets have no order, dict keys have their JSON spelling."""
    assert of_value(one) == of_value(other)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**300, "\ud800", "\x00", b"", Decimal("NaN"), datetime.max]
)
def test_odd_values_have_a_key(value: Any) -> None:
    """Values at the edge of their type have a key too, the same every time."""
    assert of_value(value) == of_value(value)


def test_str_subclass_counts_as_str() -> None:
    """A subclass of str, int or float is its plain value, whatever its own ``__str__`` and ``__repr__`` say."""

    class Name(str):
        def __str__(self) -> str:
            return "other"

    assert of_value("x") == of_value(Name("x"))
    assert of_value(Opaque.__doc__) == of_value(Name(Opaque.__doc__))


def test_number_subclass_counts_as_number() -> None:
    """A number that converts itself to another counts as JSON writes it, as an argument and as a dict's key."""

    class Odd(int):
        def __int__(self) -> int:
            return 99

    class Half(float):
        def __float__(self) -> float:
            return 0.5

    for odd in (Odd(3), Half(1.5)):
        value = json.loads(json.dumps(odd))
        assert of_value(value) == of_value(odd)
        assert of_value({value: 1}) == of_value({odd: 1})


def wrapped(levels: int, kind: Callable[[Any], Any]) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = kind(value)
    return value


@pytest.mark.parametrize("kind", [lambda v: [v], lambda v: (v,), lambda v: {"a": v}], ids=["list", "tuple", "dict"])
def test_depth(kind: Callable[[Any], Any]) -> None:
    """Values nested 64 deep are accepted, 65 deep refused."""
    assert of_value(wrapped(64, kind)) != of_value(wrapped(63, kind))
    with pytest.raises(LockKeyError, match=r"'value'.*64"):
        of_value(wrapped(65, kind))


def test_endless_nesting_is_refused() -> None:
    """A list that holds itself is refused, not followed for ever."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(LockKeyError, match="'value'"):
        of_value(value)


SECRET = "hunter2"


class Secretive:
    def __repr__(self) -> str:
        return SECRET

    __str__ = __repr__


class SecretiveKey(Secretive):
    def __hash__(self) -> int:
        return 1


def generator() -> Any:
    yield SECRET


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Secretive(), "Secretive"),
        ([{"a": (Secretive(),)}], "Secretive"),
        ({SecretiveKey(): 1}, "SecretiveKey"),
        ({(SECRET,): 1}, "tuple"),
        ({SECRET.encode(): 1}, "bytes"),
        (generator(), "generator"),
        (1j, "complex"),
        (lambda: SECRET, "function"),
        (bytearray(SECRET.encode()), "bytearray"),
        (range(3), "range"),
        (ValueError(SECRET), "ValueError"),
        (Secretive, "type"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refusal_names_parameter_and_type_never_the_value(value: Any, kind: str) -> None:
    """What has no stable form is refused by parameter name and type; the value, which may be secret, is not shown."""

    def run(harmless: int, account: Any) -> None: ...

    with pytest.raises(LockKeyError) as refused:
        key_of(run, 1, value)
    assert "'account'" in str(refused.value)
    assert kind in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("value", [object(), [Opaque()], {b"k": 1}, {1j: 1}, wrapped(70, lambda v: [v])])
def test_refusal_reads_well(value: Any) -> None:
    """The refusal is a sentence whatever the type is called: no article stands before its name."""
    with pytest.raises(LockKeyError, match=r"'value': a value of type \w+ (that|has|cannot) "):
        of_value(value)


def test_refusal_offers_a_way_out() -> None:
    """The refusal says how to go on: choose parameters, or make the key."""
    with pytest.raises(LockKeyError, match=r"unique_on.*lock_key"):
        of_value(Opaque())


class Count(int):
    """A subclass of a plain type."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (10**5000, "int"),
        ([Count(10**5000)], "int"),
        ({10**5000: 1}, "int"),
        ({Count(10**5000): 1}, "int"),
        (wrapped(70, lambda v: [v]), "list"),
        ({b"key": 1}, "bytes"),
        ({(1, 2): 1}, "tuple"),
        (Opaque(), "Opaque"),
    ],
    ids=["int", "subclass", "int key", "subclass key", "deep", "bytes key", "tuple key", "object"],
)
def test_refusal_names_parameter_and_type(value: Any, kind: str) -> None:
    """Whatever has no key is refused by the parameter's name and its type, with a way to go on."""

    def run(amount: Any) -> None: ...

    with pytest.raises(LockKeyError, match=rf"'amount'.*\b{kind}\b.*unique_on.*lock_key"):
        key_of(run, value)


def test_repr_is_never_used() -> None:
    """No key is made of a repr, which may hold an address and differ in each process."""

    class Loud(str):
        def __repr__(self) -> str:
            raise AssertionError("repr was used")

    of_value([Loud("a"), {Loud("k"): 1}])


# -- which arguments count ---------------------------------------------------------------------


def job(account: Any, kind: str = "full", *rest: Any, note: Any = None, **extra: Any) -> None: ...


def test_unique_on_counts_named_parameters_only() -> None:
    """Only the parameters that unique_on names make the key; others may be anything."""
    assert key_of(job, 1, unique_on=["account"]) == key_of(job, 1, "x", note=Opaque(), unique_on=["account"])
    assert key_of(job, 1, unique_on=["account"]) != key_of(job, 2, unique_on=["account"])


def task_of(app: Celery, body: Callable[..., Any], **options: Any) -> Any:
    """A task of the app with this body and these options."""
    app.task(base=SingletonTask, name="x", shared=False, **options)(body)
    return app.tasks["x"]


def test_unique_on_takes_one_name(make_app: MakeApp) -> None:
    """A single name stands for a list of it."""
    one, several = task_of(make_app(), job, unique_on="account"), task_of(make_app(), job, unique_on=["account"])
    assert one.lock_key_for(1, "x") == one.lock_key_for(1, "y") == several.lock_key_for(1, "x")


def test_unique_on_order_does_not_count() -> None:
    """The names are a set: order and repetition do not count."""
    both = key_of(job, 1, "x", unique_on=["account", "kind"])
    assert both == key_of(job, 1, "x", unique_on=("kind", "account", "kind"))


def test_unique_on_nothing_is_the_name_alone() -> None:
    """With an empty list all calls of the task are the same work."""
    assert key_of(job, 1, unique_on=[]) == key_of(job, 2, "x", 3, note=4, z=5, unique_on=[])


@pytest.mark.parametrize(
    "unique_on", [["acount"], "acount", ["account", "x"], [1], 5, {"account": 1}, ["self"], [""], ""]
)
def test_unique_on_is_checked(make_app: MakeApp, unique_on: Any) -> None:
    """A name that is no parameter, or no name at all, is refused with option and value."""
    with pytest.raises(ConfigurationError, match="unique_on=") as refused:
        refuse_wrong(task_of(make_app(), job, unique_on=unique_on))
    assert repr(unique_on) in str(refused.value)


def test_template_makes_the_key() -> None:
    """A template's fields are parameters; arguments that it does not name do not count, defaults are filled in."""
    assert key_of(job, 1, lock_key="{account}-{kind}") == key_of(
        job, 1, "full", note=Opaque(), lock_key="{account}-{kind}"
    )
    assert key_of(job, 1, lock_key="{account}") != key_of(job, 2, lock_key="{account}")


@pytest.mark.parametrize(
    ("one", "other"),
    [((1,), ("1",)), ((None,), ("None",)), ((True,), (1,)), (("a-", "b"), ("a", "-b")), (("x-y", "z"), ("x", "y-z"))],
)
def test_template_fields_stay_apart(one: Any, other: Any) -> None:
    """Template fields are brought to the canonical form too: nothing is joined as text."""
    assert key_of(job, *one, lock_key="{account}-{kind}") != key_of(job, *other, lock_key="{account}-{kind}")


def test_template_field_without_stable_form_is_refused() -> None:
    """A field's value is refused as an argument is, by name and type."""
    with pytest.raises(LockKeyError, match=r"account.*Secretive") as refused:
        key_of(job, Secretive(), lock_key="{account}")
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "template",
    [
        "{}",
        "{0}",
        "{acount}",
        "{account.id}",
        "{account[0]}",
        "{account!r}",
        "{account:>3}",
        "{account",
        "account}",
        "{account:{kind}}",
    ],
)
def test_template_is_plain(template: str) -> None:
    """Only plain parameter names may stand in a template: no attributes, indexes, conversions, format specs."""
    with pytest.raises(ConfigurationError, match="lock_key=") as refused:
        builder(job, None, template)
    assert repr(template) in str(refused.value)


def test_template_braces_can_be_written() -> None:
    """Doubled braces are text."""
    assert key_of(job, 1, lock_key="{{x}}") == key_of(job, 2, lock_key="{{x}}")


def test_callable_gets_the_arguments() -> None:
    """A callable gets all arguments by name, defaults filled in, and what ``*args`` took; what it returns is the key."""
    seen = []

    def lock_key(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "k"

    keys = {key_of(job, *call, z=2, lock_key=lock_key) for call in [(1,), (3, "x"), (3, "x", 4, 5)]}
    assert 1 == len(keys)
    named = {"note": None, "z": 2}
    assert [
        ((), {"account": 1, "kind": "full", **named}),
        ((), {"account": 3, "kind": "x", **named}),
        ((4, 5), {"account": 3, "kind": "x", **named}),
    ] == seen


def test_callable_gets_extra_keywords_in_one_order() -> None:
    """A callable with ``*args`` gets extra keywords in the same order, however the call was written."""

    def lock_key(*values: Any) -> str:
        return repr(values)

    assert key_of(job, 1, x=2, y=3, lock_key=lock_key) == key_of(job, 1, y=3, x=2, lock_key=lock_key)


class Keys:
    """Callables of all shapes that take what `job` gets; each answers with account and kind."""

    separator = "-"

    def method(self, account: Any, kind: str) -> str:
        return f"{account}{self.separator}{kind}"

    def __call__(self, kind: str, account: Any) -> str:
        return f"{account}-{kind}"

    @classmethod
    def of_class(cls, account: Any, kind: str, prefix: str = "") -> str:
        return f"{prefix}{account}{cls.separator}{kind}"

    @staticmethod
    def static(account: Any, kind: str) -> str:
        return f"{account}-{kind}"


def mirrored(account: Any, kind: str = "other", *rest: Any, note: Any = None, **extra: Any) -> str:
    assert (("r",), {"z": 1}) == (rest, extra)
    return f"{account}-{kind}"


@pytest.mark.parametrize(
    "lock_key",
    [
        lambda account, kind: f"{account}-{kind}",
        lambda account, kind, /: f"{account}-{kind}",
        lambda kind, /, account: f"{account}-{kind}",
        lambda *, account, kind: f"{account}-{kind}",
        lambda **named: "{account}-{kind}".format(**named),
        lambda *values: f"{values[0]}-{values[1]}",
        lambda account, *others: f"{account}-{others[0]}",
        lambda account, *others, kind: f"{account}-{kind}",
        lambda account, kind="other", *others: f"{account}-{kind}",
        lambda note, account, missing="-", **others: f"{account}{missing}{others['kind']}",
        mirrored,
        Keys().method,
        Keys(),
        Keys.of_class,
        Keys.static,
        functools.partial(Keys.of_class, prefix=""),
        functools.partial(lambda sign, account, kind: f"{account}{sign}{kind}", "-"),
    ],
)
def test_shapes_of_callables(lock_key: Any) -> None:
    """A callable of any shape gets the arguments that it names, however the call was written."""
    expected = key_of(job, 1, "full", "r", z=1, lock_key=lambda **_: "1-full")
    assert expected == key_of(job, 1, "full", "r", z=1, lock_key=lock_key)
    if lock_key is not mirrored:
        assert expected == key_of(job, 1, lock_key=lock_key) == key_of(job, kind="full", account=1, lock_key=lock_key)


def positional(account: Any, /, kind: str = "full") -> None: ...


def test_positional_only_parameters_have_names() -> None:
    """A callable gets a positional-only argument of the task by its name."""
    assert key_of(positional, 1, lock_key=lambda kind, account: f"{account}-{kind}") == key_of(
        positional, 1, lock_key=lambda **_: "1-full"
    )


def named_only(account: Any, kind: str = "full") -> None: ...


@pytest.mark.parametrize(
    ("lock_key", "word"),
    [
        (lambda acount: "k", "'acount'"),
        (lambda account, /, acount: "k", "'acount'"),
        (lambda account, *, acount, **others: "k", "'acount'"),
        (functools.partial(lambda acount, account: "k", account=1), "'acount'"),
        (Keys.method, "staticmethod"),
        (lambda cls, account: "k", "staticmethod"),
        (max, "function"),
    ],
)
def test_callable_that_cannot_fit(lock_key: Any, word: str) -> None:
    """A callable that needs what the task does not have is refused with its value and a reason, a method with ``self`` too."""
    with pytest.raises(ConfigurationError, match=word) as refused:
        builder(named_only, None, lock_key)
    assert f"lock_key={lock_key!r}" in str(refused.value)


def test_callable_that_needs_an_extra_keyword() -> None:
    """What only ``**kwargs`` may bring is refused by the call that does not pass it."""

    def lock_key(tenant: str) -> str:
        return tenant

    assert key_of(job, 1, tenant="a", lock_key=lock_key) != key_of(job, 1, tenant="b", lock_key=lock_key)
    with pytest.raises(LockKeyError, match="'tenant'"):
        key_of(job, 1, lock_key=lock_key)


def test_method_that_makes_the_key(make_app: MakeApp) -> None:
    """In a class-based task a static or class method makes the key; a method with ``self`` is refused, not given an account."""

    class Sync(SingletonTask):
        name = "sync"

        def run(self, account: int, reason: str | None = None) -> None: ...

    class Static(Sync):
        @staticmethod
        def lock_key(account: int, reason: str | None) -> str:
            return f"{account}-{reason}"

    class OfClass(Sync):
        @classmethod
        def lock_key(cls, account: int) -> str:
            return f"{cls.name}-{account}"

    class Method(Sync):
        def lock_key(self, account: int | None = None) -> str:
            return f"{account}"

    for cls in (Static, OfClass):
        task = make_app().register_task(cls())
        assert task.lock_key_for(1) == task.lock_key_for(account=1, reason=None) != task.lock_key_for(2)
    with pytest.raises(ConfigurationError, match=r"sync.*lock_key.*staticmethod"):
        refuse_wrong(make_app().register_task(Method()))


@pytest.mark.parametrize("answer", [None, 1, b"k", ["k"]])
def test_callable_must_return_str(answer: Any) -> None:
    """A result that is no str is refused; the error names its type."""
    with pytest.raises(LockKeyError, match=type(answer).__name__):
        key_of(job, 1, lock_key=lambda *args: answer)


def test_callable_key_is_bounded() -> None:
    """1 KiB is accepted, a byte more refused; it is bytes that count."""
    assert key_of(job, 1, lock_key=lambda *args: "é" * 512)
    with pytest.raises(LockKeyError, match="1024"):
        key_of(job, 1, lock_key=lambda *args: "é" * 512 + "x")


def test_kinds_of_keys_stay_apart() -> None:
    """A template, a callable and plain arguments that say the same are different keys."""

    def run(a: str) -> None: ...

    assert 3 == len({key_of(run, "x"), key_of(run, "x", lock_key="{a}"), key_of(run, "x", lock_key=lambda a: "x")})


@pytest.mark.parametrize("lock_key", [1, ["a"], b"{a}", ""])
def test_lock_key_is_checked(make_app: MakeApp, lock_key: Any) -> None:
    """A lock_key that is neither template nor callable is refused with its value."""
    with pytest.raises(ConfigurationError) as refused:
        refuse_wrong(task_of(make_app(), job, lock_key=lock_key))
    assert f"lock_key={lock_key!r}" in str(refused.value)


@pytest.mark.parametrize("lock_key", ["{account}", lambda account: str(account)])
@pytest.mark.parametrize("unique_on", [["account"], []])
def test_only_one_option_makes_the_key(make_app: MakeApp, unique_on: Any, lock_key: Any) -> None:
    """unique_on with lock_key is refused with both values."""
    with pytest.raises(ConfigurationError) as refused:
        refuse_wrong(task_of(make_app(), job, unique_on=unique_on, lock_key=lock_key))
    assert f"unique_on={unique_on!r}" in str(refused.value)
    assert f"lock_key={lock_key!r}" in str(refused.value)


# -- decorated bodies --------------------------------------------------------------------------


def passes(function: Any) -> Any:
    """Changes no argument."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def injects(function: Any) -> Any:
    """Adds a first argument, after ``self`` where the function has that."""
    place = int("self" in inspect.signature(function).parameters)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args[:place], "session", *args[place:], **kwargs)

    return wrapper


def consumes(function: Any) -> Any:
    """Takes a keyword for itself."""

    @functools.wraps(function)
    def wrapper(*args: Any, tenant: str = "none", **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def swaps(function: Any) -> Any:
    """Has names for the arguments of the call, and passes them on in another order."""

    @functools.wraps(function)
    def wrapper(reason: Any, account: Any = 0) -> Any:
        return function(account, reason)

    return wrapper


def body(account: Any, reason: Any = None) -> Any:
    return account


def method(self: Any, account: Any, reason: Any = None) -> Any:
    return account


def body_with_session(session: str, account: Any, reason: Any = None) -> Any:
    return account


def method_with_session(self: Any, session: str, account: Any, reason: Any = None) -> Any:
    return account


SHAPES = ["function", "bind", "class", "static"]


def make_task(app: Celery, shape: str, decorator: Any, session: bool = False, **options: Any) -> Any:
    """A task with a decorated body, which returns the account."""
    plain, taking_self = (body_with_session, method_with_session) if session else (body, method)
    run = decorator(plain if shape in ("function", "static") else taking_self)
    if shape in ("function", "bind"):
        app.task(name="x", base=SingletonTask, shared=False, bind=shape == "bind", **options)(run)
        return app.tasks["x"]
    run = staticmethod(run) if shape == "static" else run
    return app.register_task(type("X", (SingletonTask,), {"name": "x", "run": run, **options})())


def returned(task: Any, *args: Any, **kwargs: Any) -> Any:
    """What the body of a locked run returns."""
    return task.apply(args, kwargs).get()


@pytest.mark.parametrize("options", [{}, {"unique_on": ["account"]}, {"lock_key": "{account}"}])
@pytest.mark.parametrize("shape", SHAPES)
def test_decorator_that_changes_nothing(make_app: MakeApp, shape: str, options: Any) -> None:
    """With a decorator that passes everything on, keys are those of the function behind it."""
    app, other = make_app(singleton_lock_eager=True), make_app()
    task, undecorated = (make_task(a, shape, d, **options) for a, d in ((app, passes), (other, lambda f: f)))
    for args, kwargs in [((1,), {}), ((1, None), {}), ((), {"account": 1}), ((2, "x"), {})]:
        assert undecorated.lock_key_for(*args, **kwargs) == task.lock_key_for(*args, **kwargs)
        assert (args or [1])[0] == returned(task, *args, **kwargs)
    with pytest.raises(ConfigurationError, match="acount"):
        refuse_wrong(make_task(make_app(), shape, passes, unique_on=["acount"]))


@pytest.mark.parametrize("shape", SHAPES)
def test_decorator_that_adds_an_argument(make_app: MakeApp, shape: str) -> None:
    """A call that Celery accepts runs, and all its arguments make the key."""
    task = make_task(make_app(singleton_lock_eager=True), shape, injects, session=True)
    assert [5, 6] == [returned(task, 5), returned(task, account=6)]
    assert 4 == len({task.lock_key_for(*args) for args in [(5,), (6,), (5, 1), (5, 2)]})
    assert task.lock_key_for(5) == task.lock_key_for(5)


@pytest.mark.parametrize("shape", SHAPES)
def test_decorator_that_takes_an_argument(make_app: MakeApp, shape: str) -> None:
    """A keyword for the decorator alone is part of the key, and may be named by unique_on."""
    task = make_task(make_app(singleton_lock_eager=True), shape, consumes)
    assert [5, 5] == [returned(task, 5, tenant="a"), returned(task, account=5)]
    assert 3 == len({task.lock_key_for(5), task.lock_key_for(5, tenant="a"), task.lock_key_for(5, tenant="b")})
    task = make_task(make_app(), shape, consumes, unique_on=["tenant"])
    assert task.lock_key_for(5, tenant="a") == task.lock_key_for(6, tenant="a") != task.lock_key_for(5, tenant="b")
    assert task.lock_key_for(5) == task.lock_key_for(6, tenant="none")


@pytest.mark.parametrize(
    "options", [{"unique_on": ["account"]}, {"lock_key": "{account}"}, {"lock_key": lambda account: f"{account}"}]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_behind_a_decorator(make_app: MakeApp, shape: str, options: Any) -> None:
    """A parameter behind a decorator counts if it is passed by keyword; else the call is refused."""
    app = make_app(singleton_lock_eager=True)
    task = make_task(app, shape, injects, session=True, **options)
    assert 5 == returned(task, account=5)
    assert task.lock_key_for(account=5) == task.lock_key_for(reason="x", account=5) != task.lock_key_for(account=6)
    with pytest.raises(LockKeyError, match="'account'"):
        task.lock_key_for(5)
    task = make_task(make_app(), shape, consumes, **options)
    assert task.lock_key_for(account=5, tenant="a") == task.lock_key_for(5) != task.lock_key_for(6)


def test_defaults_behind_a_decorator(make_app: MakeApp) -> None:
    """A parameter that nobody passed has its default, unless an argument without a name may be it."""
    app = make_app()
    task = make_task(app, "function", consumes, lock_key="{account}-{reason}")
    assert task.lock_key_for(account=5, tenant="a") == task.lock_key_for(5, None)
    with pytest.raises(LockKeyError, match=r"'account'.*decorator.*keyword.*lock_key"):
        task.lock_key_for(5, tenant="a")


def test_optional_parameter_of_a_callable_behind_a_decorator(make_app: MakeApp) -> None:
    """A callable does not make a key of its own default while the argument may be one without a name."""
    task = make_task(
        make_app(), "function", injects, session=True, lock_key=lambda account=None, sign="-": f"{sign}{account}"
    )
    assert task.lock_key_for(account=5) != task.lock_key_for(account=6)
    with pytest.raises(LockKeyError, match="'account'"):
        task.lock_key_for(5)
    task = make_task(make_app(), "function", injects, session=True, lock_key=lambda *args, **kwargs: f"{args}{kwargs}")
    assert task.lock_key_for(5) != task.lock_key_for(6)


def test_parameter_with_the_name_of_the_decorators_rest(make_app: MakeApp) -> None:
    """A parameter of the function that is called ``args`` has its own default, whatever the decorator calls ``args``."""

    @passes
    def run(account: int, args: str | None = None) -> None: ...

    task = task_of(make_app(), run, lock_key="{account}-{args}")
    assert task.lock_key_for(1) == task.lock_key_for(1, None) != task.lock_key_for(1, "x")


def test_names_of_the_decorator_count(make_app: MakeApp) -> None:
    """Where the decorator has a name for an argument, that is its name, also if the call fits the function behind it."""
    task = make_task(make_app(), "function", swaps, unique_on="account")
    assert task.lock_key_for("x", 5) == task.lock_key_for("y", 5) == task.lock_key_for("y", account=5)
    assert task.lock_key_for("x", 5) != task.lock_key_for("x", 6)
    assert task.lock_key_for("x") == task.lock_key_for("x", 0)


def outcome_of(bind: Callable[[], Any]) -> Any:
    """What a function returns, as a list of items, or the text of its TypeError."""
    try:
        return list(bind().items())
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize("decorator", [passes, injects, consumes, swaps])
@pytest.mark.parametrize(
    "call", [((), {}), ((1,), {}), ((1, 2), {}), ((1, 2, 3), {}), ((1,), {"x": 2}), ((1,), {"tenant": 2})]
)
def test_decorated_task_refuses_what_celery_refuses(make_app: MakeApp, decorator: Any, call: Any) -> None:
    """A call is a TypeError where Celery says so, with its words, or where it fits neither; else it has a key."""
    task = make_task(make_app(), "function", decorator)
    celerys = outcome_of(lambda: {"ok": task.__header__(*call[0], **call[1])})
    ours = outcome_of(lambda: {"ok": task.lock_key_for(*call[0], **call[1])})
    assert ours == celerys if isinstance(celerys, str) else isinstance(ours, list)


def test_decorator_without_wraps(make_app: MakeApp) -> None:
    """A bound task whose decorator says nothing of what it wraps takes the arguments that Celery takes."""

    def silent(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    for shape in SHAPES:
        task = make_task(make_app(singleton_lock_eager=True), shape, silent)
        assert 5 == returned(task, 5)
        assert task.lock_key_for(5) != task.lock_key_for(6)


# -- keys of tasks -----------------------------------------------------------------------------


@given(st.text(max_size=20))
def test_task_name_in_key_is_readable_and_harmless(name: str) -> None:
    """A task name in a key has no braces (they mark a hash tag), no blanks and no control characters."""
    shown = escaped(name)
    assert shown.isprintable() or not shown
    assert not set(shown) & set("{} \n\t\x00")


@given(st.text(max_size=4), st.text(max_size=4))
@example(" 28", "\u2028")
@example("%20", " ")
def test_task_names_stay_apart(one: str, other: str) -> None:
    """Keys are per task: different names are spelled differently."""
    assume(one != other)
    assert escaped(one) != escaped(other)


def test_key_of_a_task(singleton: Callable[..., Any]) -> None:
    """A key reads ``singleton:{name}:lock:<digest>``."""

    @singleton(name="app.tasks.sync")
    def sync(account: int) -> None: ...

    key = sync.lock_key_for(5)
    assert key.startswith("singleton:{app.tasks.sync}:lock:")
    assert key == sync.lock_key_for(account=5)
    assert key != sync.lock_key_for(6)


@pytest.mark.parametrize(
    "name", ["a{b}c", "tab\there", "line\nbreak", "nul\x00", "esc\x1b[31m", "wide\u2028", "sp ace"]
)
def test_key_of_an_oddly_named_task(singleton: Callable[..., Any], name: str) -> None:
    """Braces and control characters of a task name are escaped, so that there is one hash tag and a log line stays one."""

    @singleton(name=name)
    def odd() -> None: ...

    key = odd.lock_key_for()
    assert key.isprintable()
    assert (1, 1) == (key.count("{"), key.count("}"))
    assert " " not in key


def test_tasks_do_not_share_keys(singleton: Callable[..., Any]) -> None:
    """Two tasks with the same arguments are different work."""

    @singleton(name="one")
    def one(a: int) -> None: ...

    @singleton(name="two")
    def two(a: int) -> None: ...

    assert one.lock_key_for(1) != two.lock_key_for(1)


def test_bound_task_leaves_self_out(singleton: Callable[..., Any]) -> None:
    """With bind=True the task itself is no argument: keys are those of the plain function."""

    @singleton(name="x", bind=True)
    def bound(self: Any, a: int, b: int = 1) -> None: ...

    assert bound.lock_key_for(3, b=1) == f"singleton:{{x}}:lock:{key_of(lambda a, b=1: None, 3)}"


def test_class_based_task(make_app: MakeApp) -> None:
    """A class-based task's key is made of ``run``'s arguments without self."""
    app = make_app()

    class Sync(SingletonTask):
        name = "cls"

        def run(self, a: int, b: int = 1) -> None: ...

    task = app.register_task(Sync())
    assert task.lock_key_for(3) == task.lock_key_for(a=3, b=1)
    assert task.lock_key_for(3) != task.lock_key_for(4)


@pytest.mark.parametrize("options", [{}, {"unique_on": ["a"]}, {"lock_key": "{a}"}, {"bind": True}])
def test_call_that_does_not_fit_raises_as_celery_does(singleton: Callable[..., Any], options: dict[str, Any]) -> None:
    """A call that does not bind raises the TypeError that Celery raises for it."""
    if options.get("bind"):

        @singleton(name="x", **options)
        def task(self: Any, a: int) -> None: ...
    else:

        @singleton(name="x", **options)
        def task(a: int) -> None: ...

    with pytest.raises(TypeError) as celerys:
        task.apply_async((1, 2), {"c": 3})
    with pytest.raises(TypeError) as ours:
        task.lock_key_for(1, 2, c=3)
    assert str(celerys.value) == str(ours.value)


def test_prefix_setting(make_app: MakeApp) -> None:
    """The setting singleton_lock_prefix is the first part of every key."""
    app = make_app(singleton_lock_prefix="shop")

    @app.task(base=SingletonTask, name="x")
    def task() -> None: ...

    assert task.lock_key_for().startswith("shop:{x}:lock:")


def test_body_that_mutates_its_arguments(app: Celery, singleton: Callable[..., Any]) -> None:
    """The key is made once, before the body, so a body that changes its arguments does not change it."""
    keys = []

    @singleton(name="x", bind=True)
    def task(self: Any, values: list[int]) -> None:
        keys.append(self.lease.key)
        values.append(2)
        keys.append(self.lease.key)

    values = [1]
    expected = task.lock_key_for([1])
    assert task.apply((values,)).successful()
    assert [expected, expected] == keys
    assert task.lock_holder([1]) is None


def test_canonical_form_is_json() -> None:
    """A canonical form is made of JSON types alone."""
    json.dumps(canonical({"a": {1, UUID(int=1)}, "b": (b"x", datetime.min, Decimal(1))}, "p"))
