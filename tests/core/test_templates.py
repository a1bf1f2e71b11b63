"""URI templates: expansion as in RFC 6570, matching as the reverse, and URIs that do not match."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trio_mcp.core import UsageError
from trio_mcp.core.schema import Matcher, Template, Value

# RFC 6570, section 3.2: the variables, then its examples, operator by operator.
VALUES: dict[str, Value] = {
    "count": ["one", "two", "three"],
    "dom": ["example", "com"],
    "dub": "me/too",
    "hello": "Hello World!",
    "half": "50%",
    "var": "value",
    "who": "fred",
    "base": "http://example.com/home/",
    "path": "/foo/bar",
    "list": ["red", "green", "blue"],
    "keys": {"semi": ";", "dot": ".", "comma": ","},
    "v": "6",
    "x": "1024",
    "y": "768",
    "empty": "",
    "empty_keys": {},
    "undef": None,
}
EXAMPLES = """
{count}                 one,two,three
{count*}                one,two,three
{/count}                /one,two,three
{/count*}               /one/two/three
{;count}                ;count=one,two,three
{;count*}               ;count=one;count=two;count=three
{?count}                ?count=one,two,three
{?count*}               ?count=one&count=two&count=three
{&count*}               &count=one&count=two&count=three
{var}                   value
{hello}                 Hello%20World%21
{half}                  50%25
O{empty}X               OX
O{undef}X               OX
{x,y}                   1024,768
{x,hello,y}             1024,Hello%20World%21,768
?{x,empty}              ?1024,
?{x,undef}              ?1024
?{undef,y}              ?768
{var:3}                 val
{var:30}                value
{list}                  red,green,blue
{list*}                 red,green,blue
{keys}                  semi,%3B,dot,.,comma,%2C
{keys*}                 semi=%3B,dot=.,comma=%2C
{+var}                  value
{+hello}                Hello%20World!
{+half}                 50%25
{base}index             http%3A%2F%2Fexample.com%2Fhome%2Findex
{+base}index            http://example.com/home/index
O{+empty}X              OX
O{+undef}X              OX
{+path}/here            /foo/bar/here
here?ref={+path}        here?ref=/foo/bar
up{+path}{var}/here     up/foo/barvalue/here
{+x,hello,y}            1024,Hello%20World!,768
{+path,x}/here          /foo/bar,1024/here
{+path:6}/here          /foo/b/here
{+list}                 red,green,blue
{+list*}                red,green,blue
{+keys}                 semi,;,dot,.,comma,,
{+keys*}                semi=;,dot=.,comma=,
{#var}                  #value
{#hello}                #Hello%20World!
{#half}                 #50%25
foo{#empty}             foo#
foo{#undef}             foo
{#x,hello,y}            #1024,Hello%20World!,768
{#path,x}/here          #/foo/bar,1024/here
{#path:6}/here          #/foo/b/here
{#list}                 #red,green,blue
{#list*}                #red,green,blue
{#keys}                 #semi,;,dot,.,comma,,
{#keys*}                #semi=;,dot=.,comma=,
{.who}                  .fred
{.who,who}              .fred.fred
{.half,who}             .50%25.fred
www{.dom*}              www.example.com
X{.var}                 X.value
X{.empty}               X.
X{.undef}               X
X{.var:3}               X.val
X{.list}                X.red,green,blue
X{.list*}               X.red.green.blue
X{.keys}                X.semi,%3B,dot,.,comma,%2C
X{.keys*}               X.semi=%3B.dot=..comma=%2C
X{.empty_keys}          X
X{.empty_keys*}         X
{/who}                  /fred
{/who,who}              /fred/fred
{/half,who}             /50%25/fred
{/who,dub}              /fred/me%2Ftoo
{/var}                  /value
{/var,empty}            /value/
{/var,undef}            /value
{/var,x}/here           /value/1024/here
{/var:1,var}            /v/value
{/list}                 /red,green,blue
{/list*}                /red/green/blue
{/list*,path:4}         /red/green/blue/%2Ffoo
{/keys}                 /semi,%3B,dot,.,comma,%2C
{/keys*}                /semi=%3B/dot=./comma=%2C
{;who}                  ;who=fred
{;half}                 ;half=50%25
{;empty}                ;empty
{;v,empty,who}          ;v=6;empty;who=fred
{;v,bar,who}            ;v=6;who=fred
{;x,y}                  ;x=1024;y=768
{;x,y,empty}            ;x=1024;y=768;empty
{;x,y,undef}            ;x=1024;y=768
{;hello:5}              ;hello=Hello
{;list}                 ;list=red,green,blue
{;list*}                ;list=red;list=green;list=blue
{;keys}                 ;keys=semi,%3B,dot,.,comma,%2C
{;keys*}                ;semi=%3B;dot=.;comma=%2C
{?who}                  ?who=fred
{?half}                 ?half=50%25
{?x,y}                  ?x=1024&y=768
{?x,y,empty}            ?x=1024&y=768&empty=
{?x,y,undef}            ?x=1024&y=768
{?var:3}                ?var=val
{?list}                 ?list=red,green,blue
{?list*}                ?list=red&list=green&list=blue
{?keys}                 ?keys=semi,%3B,dot,.,comma,%2C
{?keys*}                ?semi=%3B&dot=.&comma=%2C
{&who}                  &who=fred
{&half}                 &half=50%25
?fixed=yes{&x}          ?fixed=yes&x=1024
{&x,y,empty}            &x=1024&y=768&empty=
{&x,y,undef}            &x=1024&y=768
{&var:3}                &var=val
{&list}                 &list=red,green,blue
{&list*}                &list=red&list=green&list=blue
{&keys}                 &keys=semi,%3B,dot,.,comma,%2C
{&keys*}                &semi=%3B&dot=.&comma=%2C
"""


@pytest.mark.parametrize(("text", "uri"), [line.split() for line in EXAMPLES.strip().splitlines()])
def test_the_examples_of_the_rfc_are_expanded(text: str, uri: str) -> None:
    assert Template(text).expand(VALUES) == uri


@pytest.mark.parametrize(
    ("text", "values", "uri"),
    [
        ("{x}", {"x": "é€😀"}, "%C3%A9%E2%82%AC%F0%9F%98%80"),
        ("{x:2}", {"x": "é€😀"}, "%C3%A9%E2%82%AC"),
        ("{+x:2}", {"x": "%C3%A9%E2%82%ACz"}, "%C3%A9%E2%82%AC"),  # "not to split ... pct-encoded triplets"
        ("{+x:2}", {"x": "%41%42%43"}, "%41%42"),
        ("{x:2}", {"x": "%41"}, "%254"),
        ("{+x}", {"x": "100%zz%20"}, "100%25zz%20"),
        ("é-ü/{x}", {"x": "1"}, "%C3%A9-%C3%BC/1"),
        ("it's%20{x}", {"x": "~"}, "it's%20~"),
        ("{a.b_c}{%41x}", {"a.b_c": "1", "%41x": "2"}, "12"),
        ("{?%41x}", {"%41x": "2"}, "?%41x=2"),
        ("{x*}", {"x": {"k": ""}}, "k="),
        ("{;x*}", {"x": {"k": ""}}, ";k"),
        ("{?x}", {"x": ()}, ""),
        ("{?x}", {"x": [""]}, "?x="),
        ("{x}{y}", {}, ""),
    ],
)
def test_edge_cases_of_expansion(text: str, values: dict[str, Value], uri: str) -> None:
    assert Template(text).expand(values) == uri


def test_variables_are_named_once_in_order() -> None:
    assert Template("{b}/{a,b}{?c*,d:3}").variables == ("b", "a", "c", "d")


def test_templates_of_the_same_text_are_equal() -> None:
    assert Template("x:{a}") == Template("x:{a}")
    assert Template("x:{a}") != Template("x:{b}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "unpaired brace") for text in ("{", "}", "a{b", "a}b", "{a{b}}", "{{a}", "{a}}")),
        *(
            (text, "invalid expression")
            for text in ("{}", "{+}", "{=a}", "{!a}", "{|a}", "{a b}", "{a,}", "{,a}", "{a+}")
        ),
        *(
            (text, "invalid expression")
            for text in ("{a:0}", "{a:10000}", "{a*:3}", "{a:3*}", "{a..b}", "{.a.}", "{é}", "{%4}")
        ),
        *(
            (text, "percent-encoded")
            for text in ("a b", "a\tb", "%", "%zz", "a|b", "<a>", '"', "a\\b", "^", "`", "\ud800")
        ),
    ],
)
def test_a_malformed_template_is_refused_with_the_reason(text: str, why: str) -> None:
    for make in (Template, Matcher):
        with pytest.raises(UsageError, match=why):
            make(text)


@pytest.mark.parametrize(
    ("text", "value", "why"),
    [
        ("{x}", 5, "got int"),
        ("{x}", ["a", None], "got NoneType"),
        ("{x}", {"k": 1}, "got int"),
        ("{x}", {"a", "b"}, "got set"),
        ("{x:3}", ["a"], "takes a prefix of x"),
        ("{x:3}", {"a": "b"}, "takes a prefix of x"),
        ("{x}", "\ud800", "surrogate"),
    ],
)
def test_values_that_cannot_be_expanded_are_refused(text: str, value: Value, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Template(text).expand({"x": value})


# Matching.


@pytest.mark.parametrize(
    ("text", "uri", "values"),
    [
        ("notes://list", "notes://list", {}),
        ("notes://{name}", "notes://todo", {"name": "todo"}),
        ("notes://{name}", "notes://a%20b%C3%A9", {"name": "a bé"}),
        ("notes://{name}", "notes://a bé", {"name": "a bé"}),
        ("notes://{name}", "notes://a%2520", {"name": "a%20"}),  # decoded once
        ("test://template/{id}/data", "test://template/123/data", {"id": "123"}),
        ("user:{mail}", "user:a@b:c", {"mail": "a@b:c"}),
        ("geo:{lat},{lon}", "geo:59.9,10.7", {"lat": "59.9", "lon": "10.7"}),
        ("geo:{lat,lon}", "geo:59.9,10.7", {"lat": "59.9", "lon": "10.7"}),
        ("file:///{name}.txt", "file:///a.txt.txt", {"name": "a.txt"}),
        ("x:{a}@h:{b}:@{c}", "x:1:2@h:3:@4:5", {"a": "1:2", "b": "3", "c": "4:5"}),  # only the nearest delimiters stop
        ("x:v{major}:{rest}.tar", "x:v1.2:a.tar.tar", {"major": "1.2", "rest": "a.tar"}),
        ("x:{a}{/b,c}", "x:1/2/3", {"a": "1", "b": "2", "c": "3"}),
        ("x:{a}/z{.b}", "x:1/z.2.3", {"a": "1", "b": "2.3"}),
        ("file:///{+path}", "file:///a/b%20c.txt", {"path": "a/b c.txt"}),
        ("file://{+path}", "file:///etc/hosts", {"path": "/etc/hosts"}),
        ("file:/{/path*}/", "file://a/b/", {"path": "a/b"}),
        ("file:{/path*}", "file:/a/b", {"path": "a/b"}),
        ("x:{+path}/{name}.txt", "x:a/b/c.txt", {"path": "a/b", "name": "c"}),
        ("x:{+path}:{line}", "x:a:b:7", {"path": "a:b", "line": "7"}),
        ("x:{a}/{+b}/{c}", "x:1/2/3/4", {"a": "1", "b": "2/3", "c": "4"}),
        ("get:{+url}", "get:http://h/p?q=1#f", {"url": "http://h/p?q=1#f"}),
        ("get:{+url}{?q}", "get:a/b?q=1", {"url": "a/b", "q": "1"}),
        ("get:{+url};v={v}", "get:a/b?c;v=1", {"url": "a/b?c", "v": "1"}),
        ("x{#f}", "x#a/b?c", {"f": "a/b?c"}),
        ("x:{a}{#f}", "x:1#2", {"a": "1", "f": "2"}),
        ("find:{?q,n}", "find:?q=a%2Fb&n=5", {"q": "a/b", "n": "5"}),
        ("find:{?q,n}", "find:?n=5&q=a/b", {"q": "a/b", "n": "5"}),
        ("find:{?q,n}", "find:?n=", {"n": ""}),
        ("find:{?q,n}", "find:?n", {"n": ""}),
        ("find:{?q}", "find:?q=a=b\\c+d", {"q": "a=b\\c+d"}),
        ("find:{?q,n}", "find:", {}),
        ("find:{?q}#top", "find:?q=1#top", {"q": "1"}),
        ("find:?v=1{&q,n}", "find:?v=1&n=2", {"n": "2"}),
        ("map:{a}{;x,y}/{b}{?q}", "map:1;y=3;x=2/4?q=5", {"a": "1", "x": "2", "y": "3", "b": "4", "q": "5"}),
        ("map:{a}{;x,y}/{b}{?q}", "map:1/4", {"a": "1", "b": "4"}),
        ("é:{x}", "é:1", {"x": "1"}),
        ("é:{x}", "%C3%A9:1", {"x": "1"}),
        ("x.y:{a}", "x.y:1", {"a": "1"}),
        ("x:{a}", "x:a..b...", {"a": "a..b..."}),  # dots, but no segment ".."
    ],
)
def test_matching_a_uri_returns_the_values(text: str, uri: str, values: dict[str, str]) -> None:
    assert Matcher(text).match(uri) == values


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("notes://{name}", "notes://"),
        ("notes://{name}", "notes://a/b"),
        ("notes://{name}", "notes://a?b"),
        ("notes://{name}", "notes://a#b"),
        ("notes://{name}", "Notes://a"),
        ("notes://{name}", " notes://a"),
        ("notes://{name}", "notes://a\n"),
        ("notes://{name}/x", "notes://a/x/x"),
        ("geo:{lat},{lon}", "geo:1,2,3"),
        ("geo:{lat},{lon}", "geo:1"),
        ("x.y:{a}", "x-y:1"),
        ("find:{?q}", "find:?"),
        ("find:{?q}", "find:?q=1&q=2"),
        ("find:{?q}", "find:?p=1"),
        ("find:{?q}", "find:?q=1&p=1"),
        ("find:{?q}", "find:?q=1&"),
        ("find:{?q}", "find:?q=1#f"),
        ("get:{+url}{?q}", "get:a?b?q=1"),
        ("x:{/a}", "x:"),
        ("notes://{name}", "notes://%"),
        ("notes://{name}", "notes://%zz"),
        ("notes://{name}", "notes://%ff"),
        ("find:{?q}", "find:?q=%ff"),
        ("notes://{name}", "notes://\ud800"),
    ],
)
def test_another_uri_does_not_match(text: str, uri: str) -> None:
    assert Matcher(text).match(uri) is None


# res-10: "Every resource URI received is validated before use."
ESCAPES = [
    "..",
    "%2e%2e",
    "%2E.",
    "a%2Fb",
    "a%2fb",
    "%2Fetc%2Fpasswd",
    "..%2F..%2Fetc",
    "a\\b",
    "a%5Cb",
    "a%5cb",
    "..%5C..",
    "a%00b",
    "%00",
    "\0",
    "%C0%AF",  # an overlong slash
    "%C0%AE%C0%AE",
    "%EF%BF%BF%ED%A0%80",  # half a surrogate pair, encoded
]


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize(
    "text", ["f:{x}", "f:{x}.txt", "f:/a{/x}/b", "f:{+x}", "f:///{+x}", "f:{/x*}", "f:{#x}", "f:{.x}", "f:{;x}"]
)
def test_a_value_that_leaves_its_segment_does_not_match(text: str, escape: str) -> None:
    matcher = Matcher(text)
    honest = Template(text).expand({"x": "HERE"})
    assert matcher.match(honest) == {"x": "HERE"}
    assert matcher.match(honest.replace("HERE", escape)) is None


@pytest.mark.parametrize("path", ["../x", "x/../y", "x/..", "x/%2e%2e/y", "x/..%2fy", "x\\..\\y", "x/%00"])
@pytest.mark.parametrize("text", ["f:{+x}", "f:/{+x}", "f:{/x*}", "f:{#x}"])
def test_a_path_with_dot_segments_does_not_match(text: str, path: str) -> None:
    assert Matcher(text).match(Template(text).expand({"x": "HERE"}).replace("HERE", path)) is None


@pytest.mark.parametrize("uri", ["f:////etc/passwd", "f:///%2Fetc/passwd"])
def test_a_path_below_a_slash_cannot_be_made_absolute(uri: str) -> None:
    assert Matcher("f:///{+x}").match("f:///etc") == {"x": "etc"}
    assert Matcher("f:///{+x}").match(uri) is None
    assert Matcher("f://{/x*}").match(uri) is None


@pytest.mark.parametrize("value", ["..", "../x", "a/../b", "a\\..\\b", "%2e%2e%2fx", "a%5C..", "a%00"])
def test_a_query_value_may_have_slashes_but_no_dot_segments(value: str) -> None:
    assert Matcher("f:{?x}").match("f:?x=a/b%5Cc%2Fd") == {"x": "a/b\\c/d"}
    assert Matcher("f:{?x}").match(f"f:?x={value}") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{a}{b}", r"'\{a\}\{b\}' cannot be matched: the value before \{b\} has no delimiter after it"),
        ("{a}-{b}", "has no delimiter after it"),
        ("{a}{.b}", "has no delimiter after it"),
        ("{.a,b}", "has no delimiter after it"),
        ("{a}{+b}", "has no delimiter after it"),
        ("{+a}x{b}", "has no delimiter after it"),
        ("{a}%2F{b}", "has no delimiter after it"),
        ("{+a}/{+b}", "it may have only one of"),
        ("{+a}{#b}", "it may have only one of"),
        ("{+a,b}", "it may have only one of"),
        ("{/a*}{/b*}", "it may have only one of"),
        ("{a:3}", "drop the :3"),
        ("{a*}", r"write \{\+a\} or \{/a\*\}"),
        ("{+a*}", r"write \{\+a\} or \{/a\*\}"),
        ("{?a*}", "drop the \\*"),
        ("{a}/{a}", "it has two variables a"),
        ("{?a,a}", "it has two variables a"),
        ("{?a}/x", "put it last"),
        ("{?a}x", "put it last"),
        ("{?a}{&b}", "put it last"),
        ("{?a}{b}", "put it last"),
        ("{;a}x", "put it last"),
        ("{;a}{b}", "put it last"),
        ("{;a}{.b}", "put it last"),
    ],
)
def test_an_ambiguous_template_is_refused_with_the_change_to_make(text: str, why: str) -> None:
    Template(text)  # expansion is possible
    with pytest.raises(UsageError, match=why):
        Matcher(text)


def test_only_named_variables_are_optional() -> None:
    matcher = Matcher("x:{a}{;b}/{+c}{?d,e}")
    assert matcher.optional == {"b", "d", "e"}
    assert matcher.template == Template("x:{a}{;b}/{+c}{?d,e}")


SHAPES = [
    "n://{a}",
    "n://{a}.txt",
    "n://{a}/{b}",
    "n:{a,b}",
    "n:{a}-:{b}",
    "n:{+a}/x{b}",
    "n:{+a}::{b}.y{?c}",
    "n:x{/a,b}",
    "n:{a}/{+b}",
    "n:{a}{;c}{?b}",
    "n:{?a,b,c}",
    "n:{a}?x{&b}",
    "n://h{/a*}/{b}",
    "n:{b}{#a}",
]


@given(st.sampled_from(SHAPES), st.data())
@settings(max_examples=300)
def test_matching_returns_the_expanded_values(shape: str, data: st.DataObject) -> None:
    matcher = Matcher(shape)
    alphabet = st.sampled_from("ab.-:;?&=#,@ xyt%+é€😀") | st.characters(codec="utf-8", exclude_characters="/\\\0")
    values = {
        name: data.draw(st.text(alphabet, min_size=1, max_size=6))
        for name in matcher.template.variables
        if name not in matcher.optional or data.draw(st.booleans())
    }
    assume(".." not in values.values())
    for name, value in values.items():
        if f"+{name}" in shape or f"#{name}" in shape:
            # {+x} leaves these characters as they are, so they are ambiguous in a match.
            assume("%" not in value and not set(value) & set("?#;&"))
    assert matcher.match(matcher.template.expand(values)) == values


@given(st.sampled_from(SHAPES), st.text("ab./:%2eEfF5cC\\?#;&=-x,\0", max_size=20))
@settings(max_examples=300)
def test_any_uri_gives_safe_values_or_does_not_match(shape: str, tail: str) -> None:
    values = Matcher(shape).match(shape[: shape.index("{")] + tail)
    for value in (values or {}).values():
        assert "\0" not in value
        assert ".." not in value.replace("\\", "/").split("/")


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("n:{a}.txt", ".txt"),
        ("n:{+a}/{b}/{c}", "/"),
        ("n:{+a}/{b}/{c}", "a/"),
        ("n:{+a}:{b}.x", ":.x"),
        ("n:{a}x/{b}x/{c}x", "x"),
        ("n:{+a}/{b}.txt/{c}.txt{?d}", ".txt/"),
        ("n:{;a}/{b}", ";a=1"),
        ("n:{?a}", "&a"),
        ("n:{a}", "%41"),
        ("n:{+a}", "é"),
    ],
)
def test_long_hostile_uris_are_matched_in_linear_time(text: str, unit: str) -> None:
    # Quadratic work on this length takes minutes, which the timeout of the suite turns into a failure.
    matcher = Matcher(text)
    for end in ("", "?", "#", "\0", "/"):
        matcher.match("n:" + unit * (300_000 // len(unit)) + end)


@pytest.mark.parametrize("operators", list(itertools.product(["", "+", "#", ".", "/", ";", "?", "&"], repeat=2)))
def test_every_pair_of_expressions_is_either_refused_or_matched_exactly(operators: tuple[str, str]) -> None:
    text = "n:" + "".join(f"{{{operator}{name}}}" for operator, name in zip(operators, "ab", strict=True))
    values = {"a": "1", "b": "2"}
    try:
        matcher = Matcher(text)
    except UsageError:
        return
    assert matcher.match(Template(text).expand(values)) == values
