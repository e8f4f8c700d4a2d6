#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/data/template-golden.json: templates, conversations, and what Jinja makes of them.

Jinja is set up as Transformers does it (sandbox, trim_blocks, lstrip_blocks, loop controls, tojson, raise_exception); needs python3-jinja2.
A case whose text is null is one that Jinja refuses, and so must we.
"""

import json
import pathlib
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI "
    "assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

STRICT = """{{ bos_token }}{% for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}
{%- endif %}
{%- if message.role == 'user' -%}
[INST] {{ message.content | trim }} [/INST]
{%- else -%}
 {{ message.content + eos_token }}
{%- endif %}
{%- endfor %}
"""

NAMESPACES = """{%- set ns = namespace(system='', last=-1) -%}
{%- for message in messages -%}
    {%- if message['role'] == 'system' -%}{%- set ns.system = ns.system ~ message.content -%}
    {%- elif message['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro turn(message, kind='plain') -%}
<{{ kind }}:{{ message.role | upper }}>{{ message.content.split('</think>')[-1].lstrip('\n') | trim }}</{{ kind }}>
{%- endmacro -%}
[{{ ns.system or 'none' }}]
{%- for message in messages if message.role != 'system' %}

  {{- turn(message, kind='last' if loop.last else 'turn') }}
{%- else %}
nothing said
{%- endfor %}
"""

WHITE = """
{# a comment #}
  {% if true %}
    kept
  {% endif %}
a {%- if true %} b {%- endif %} c
{{ 'x' -}}
   y
  {%+ if true %}
 plus {% endif +%}
tail {% raw %}{{ not run }}{% endraw %}
  {#- strip -#}

last


"""

SNIPPETS = """
{{ 1 + 2 * 3 - 4 // 3 % 2 }}|{{ 7 / 2 }}|{{ -7 // 2 }}|{{ -7 % 3 }}|{{ 2 ** 10 }}|{{ 7 % -3 }}
{{ 'a' ~ 1 ~ none ~ true ~ 1.5 }}
{{ 'ab' * 3 }}{{ [1, 2] * 2 }}{{ [1] + [2, 'x'] }}
{{ 'abc'[0] }}{{ 'abc'[-1] }}{{ 'abcdef'[1:4] }}{{ 'abcdef'[::-1] }}{{ 'abcdef'[::2] }}{{ 'abcdef'[-3:] }}{{ 'abcdef'[:-4] }}{{ 'abc'[5:] }}{{ 'abcdef'[4:1:-2] }}
{{ [1, 2, 3, 4][1:] }}{{ [1, 2, 3][-1] }}{{ (1, 2) }}{{ (1,) }}{{ () }}
{{ 1 < 2 < 3 }}{{ 1 < 2 > 3 }}{{ 1 == 1.0 }}{{ 'a' < 'b' }}{{ 'a' == 1 }}{{ [1] == [1] }}{{ true == 1 }}
{{ 'a' in 'abc' }}{{ 'x' not in 'abc' }}{{ 1 in [1, 2] }}{{ 'k' in {'k': 1} }}
{{ not true or true and false }}{{ not false }}{{ 1 and 2 }}{{ 0 or 'x' }}{{ '' or none }}
{{ 'yes' if messages else 'no' }}{{ 'x' if false }}|{{ 'a' if false else 'b' if false else 'c' }}
{{ missing }}|{{ missing is defined }}|{{ messages is defined }}|{{ missing | default('d') }}|{{ '' | default('e', true) }}|{{ none | default('f') }}
{{ missing.attribute }}
{{ missing + 1 }}
{{ missing() }}
{{ 'a' + 1 }}
{{ 1 / 0 }}
{{ messages[0].role }}{{ messages[0]['content'] }}{{ messages[99] }}{{ messages[0].nothing }}{{ messages[0].nothing is defined }}
{{ messages | length }}{{ 'äöü' | length }}{{ {'a': 1} | length }}
{{ '  x  ' | trim }}|{{ 'xxaxx' | trim('x') }}|{{ ' a b ' | upper }}|{{ 'ÄÖé' | lower }}|{{ 'éa' | upper }}|{{ 'hello wORLD' | capitalize }}|{{ 'hello wORLD' | title }}
{{ ['a', 'b', 3] | join(', ') }}{{ messages | map(attribute='role') | join('-') }}{{ 'abc' | join('.') }}
{{ [3, 1, 2] | sort }}{{ ['b', 'A', 'c'] | sort }}{{ ['b', 'A', 'c'] | sort(case_sensitive=true) }}{{ [3, 1, 2] | sort(reverse=true) }}
{{ [1, 2, 3] | first }}{{ [1, 2, 3] | last }}{{ [] | first }}{{ 'abc' | first }}{{ 'abc' | last }}
{{ [1, 2, 3] | sum }}{{ [3, 1] | min }}{{ [3, 1] | max }}{{ [1, 2, 1] | unique | list }}{{ [1, 2, 3] | reverse | list }}{{ 'abc' | reverse }}
{{ {'b': 1, 'a': [1, 2.5, none, true, 'x"y\\n']} | tojson }}{{ {'a': {}} | tojson(indent=2) }}{{ [] | tojson }}{{ {'b': [1, {'c': 2}]} | tojson(indent=4) }}
{{ messages[0] | tojson }}{{ 'é<>&\\'' | tojson }}{{ '\\u0001\\t' | tojson }}
{{ {'a': 1, 'b': 'x', 'c': [1, 'y'], 'd': none} }}{{ ["it's", 'a"b', 'c\\n\\\\'] }}
{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}{% for k in {'a': 1} %}{{ k }}{% endfor %}{% for k, v in {'x': 1} | items %}{{ k }}{{ v }}{% endfor %}
{% for k, v in {'b': 1, 'a': 2, 'C': 3} | dictsort %}{{ k }}={{ v }};{% endfor %}
{% for x in [1, 2, 3] %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.depth }};{% endfor %}
{% for x in 'abc' %}{{ x }}.{% endfor %}{% for x in missing %}x{% else %}none{% endfor %}{% for x in [] %}x{% else %}empty{% endfor %}
{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x > 4 %}{% break %}{% endif %}{{ x }}{% endfor %}{{ range(5, 0, -2) | list }}
{% for x in [1, 2, 3, 4] if x is even %}{{ loop.index }}:{{ x }} {% endfor %}{{ x }}
{% for x in [1, 2] %}{% for y in [3, 4] %}{{ x }}{{ y }}{{ loop.index }} {% endfor %}{{ loop.index }}{% endfor %}
{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}
{% set ns = namespace(x=1, y='a') %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.y }}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, d) = [3, 4] %}{{ c }}{{ d }}
{% set t %}  captured {{ 1 + 1 }} {% endset %}[{{ t }}]{% set u | trim | upper %}  up {% endset %}[{{ u }}]
{% macro m(a, b='B', c=none) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(b=3, a=4) }}{{ m() }}
{% macro outer(x) %}[{{ caller(x) }}]{% endmacro %}{% call(v) outer(5) %}got {{ v }}{% endcall %}
{% macro fact(n) %}{% if n > 1 %}{{ n }}*{{ fact(n - 1) }}{% else %}1{% endif %}{% endmacro %}{{ fact(5) }}
{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}
{% filter upper %}abc{{ 'd' }}{% endfilter %}
{% if 0 %}a{% elif '' %}b{% elif [] %}c{% elif {} %}d{% else %}e{% endif %}
{% generation %}said{% endgeneration %}
{{ 1 is odd }}{{ 2 is even }}{{ 9 is divisibleby 3 }}{{ 9 is divisibleby(2) }}{{ none is none }}{{ 1 is not none }}{{ 'x' is string }}{{ {} is mapping }}{{ [] is iterable }}{{ 'x' is sequence }}{{ 1 is number }}{{ 1.5 is float }}{{ 1 is integer }}{{ true is boolean }}{{ true is true }}{{ 1 is true }}{{ false is false }}
{{ 1 is eq 1 }}{{ 'a' is in ['a'] }}{{ 3 is gt 2 }}{{ 1 is sameas 1 }}{{ 'ABC' is upper }}{{ 'abc' is lower }}{{ 3 is ge(3) }}{{ not 1 is odd }}
{{ messages is string }}{{ messages[0] is mapping }}{{ messages[0].content is string }}{{ tools is none }}{{ tools is defined }}{{ documents }}
{{ 'a,b,,c'.split(',') }}{{ ' a  b '.split() }}{{ 'a,b,c'.split(',', 1) }}{{ 'a.b.c'.rsplit('.', 1) }}{{ 'a  b c '.split(none, 1) }}{{ 'a\\nb\\r\\nc\\n'.splitlines() }}
{{ 'xxabxx'.strip('x') }}{{ 'xxabxx'.lstrip('x') }}{{ 'xxabxx'.rstrip('x') }}{{ ' a '.strip() }}|{{ '\\n\\ta'.lstrip() }}|{{ '\\u2003ä\\u00a0'.strip() }}|
{{ 'abc'.startswith('ab') }}{{ 'abc'.endswith(('x', 'bc')) }}{{ 'abc'.upper() }}{{ 'a-b-a'.replace('a', 'xy') }}{{ 'aaa'.replace('a', 'b', 2) }}{{ 'abcabc'.find('c') }}{{ 'abc'.rfind('z') }}{{ 'äbä'.rfind('ä') }}{{ 'banana'.count('an') }}
{{ '-'.join(['a', 'b']) }}{{ 'a{}b{}'.format(1, 'x') }}{{ '12'.isdigit() }}{{ ' '.isspace() }}{{ ''.isspace() }}{{ 'prefix-x'.removeprefix('prefix-') }}{{ 'x.py'.removesuffix('.py') }}
{{ {'a': 1}.get('a') }}{{ {'a': 1}.get('b') }}{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.keys() | list }}{{ {'a': 1}.values() | list }}
{{ [1, 2, 1].count(1) }}{{ [1, 2].index(2) }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('role', 'equalto', 'user') | map(attribute='content') | list }}{{ [1, 2, 3] | select('odd') | list }}{{ [0, 1] | reject | list }}{{ none | selectattr('x') | list }}
{{ ['a', 'b'] | map('upper') | join }}{{ 'a\\nb\\n\\nc' | indent }}{{ 'a\\nb' | indent(2, true) }}{{ 'a\\nb' | indent(width=1) }}
{{ '42' | int + 1 }}{{ 'x' | int }}{{ 'x' | int(7) }}{{ 3.9 | int }}{{ '1.5' | float }}{{ -3 | abs }}{{ 2.5 | round }}{{ '3.7' | int }}
{{ 'a' 'b' "c" }}{{ 'it\\'s' }}{{ "\\x41\\u00e9\\\\" }}{{ 'tab\\t' }}{{ 'a\\qb' }}
{{ 1_000 }}{{ 1e3 }}{{ 1.0 }}{{ 0.1 + 0.2 }}{{ 1e16 }}{{ 1e-5 }}{{ 123456789.0 }}{{ 1.5e300 }}{{ 10 / 5 }}
{{ {'a': {'b': [1, {'c': 'deep'}]}}.a.b[1].c }}{{ {'items': 1}['items'] }}{{ [[1, 2], [3]][0][1] }}
{{ dict(a=1, b='x') }}{{ namespace(a=1).a }}
{{ '%}' }}{{ '}}' }}{{ {'a': {'b': 1}} }}
{{ raise_exception('no: ' ~ messages | length) }}
{{ messages.append(1) }}
{{ [].append(1) }}
{{ 'a'.nothing() }}
{% for x in 5 %}{% endfor %}
{{ none.x }}
{{ loop }}
{{ 'x' | nofilter }}
{{ 'x' is notest }}
{% if x %}
{% endif %}
{% for x %}{% endfor %}
{% unknown %}
{{ 1 + }}
{{ (1 }}
{{ 'open }}
{{ [1, 2 }}
{# open
{% if true %}{% else %}{% else %}{% endif %}
{{ a b }}
{% set %}
{% break %}
{{ x.}}
{{ loop.index }}
"""

CONVERSATIONS = [
    [{"role": "user", "content": "  Hi <|im_end|> there\n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 水!"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
     {"role": "user", "content": "{{ 7 * 7 }}{% if x %}"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": ""}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [],
]


class Generation(jinja2.ext.Extension):
    """The tag that Transformers adds to mark what the assistant said; it prints its content."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def refuse(message):
    raise jinja2.exceptions.TemplateError(message)


def dump(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = dump
    env.globals["raise_exception"] = refuse
    return env


def render(source, messages, prompt):
    try:
        return environment().from_string(source).render(messages=messages, tools=None, documents=None, add_generation_prompt=prompt,
                                                        bos_token="<s>", eos_token="</s>")
    except (jinja2.exceptions.TemplateError, TypeError, ValueError, ZeroDivisionError, AttributeError, SyntaxError):
        return None


def main(path):
    cases = []
    for source in [SMOLLM2, STRICT, NAMESPACES, WHITE, WHITE.replace("\n", "\r\n")]:
        for messages in CONVERSATIONS:
            for prompt in (False, True):
                cases.append({"template": source, "messages": messages, "prompt": prompt, "text": render(source, messages, prompt)})
    for source in SNIPPETS.strip("\n").split("\n"):
        cases.append({"template": source, "messages": CONVERSATIONS[1], "prompt": False, "text": render(source, CONVERSATIONS[1], False)})
    with open(path, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases) + "\n]\n")
    print(len(cases), "cases,", sum(case["text"] is None for case in cases), "refused")


main(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "data" / "template-golden.json")
