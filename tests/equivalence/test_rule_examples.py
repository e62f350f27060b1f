"""Each rule applies to its examples, and refuses a graph for each of its conditions."""

import re
from pathlib import Path

import pytest

import korch.equivalence.rules as rules_package
from korch.equivalence.rules import RULES
from korch.primitive.check import check_graph
from korch.primitive.text import parse_graph
from tests.equivalence.equivalence_examples import FIRING, REFUSING
from tests.equivalence.equivalence_oracle import apply_rules, assert_alternatives_agree, refusals

BY_NAME = {rule.name: rule for rule in RULES}


@pytest.mark.parametrize(("name", "text"), FIRING)
def test_fires_and_keeps_the_meaning(name: str, text: str) -> None:
    graph = parse_graph(text)
    check_graph(graph)
    result, report = apply_rules(graph, [BY_NAME[name]])
    assert report.rules[0].fired >= 1
    assert_alternatives_agree(result, graph)


@pytest.mark.parametrize(("name", "reason", "text"), REFUSING)
def test_refuses_with_the_reason(name: str, reason: str, text: str) -> None:
    graph = parse_graph(text)
    check_graph(graph)
    assert reason in refusals(graph, BY_NAME[name])


def test_every_rule_has_a_firing_example() -> None:
    assert {name for name, _ in FIRING} == set(BY_NAME)


def test_every_reason_has_a_refusing_example() -> None:
    folder = Path(rules_package.__file__).parent
    written = {
        reason
        for path in folder.glob("*.py")
        for reason in re.findall(r'Refusal\(\s*"([^"]+)"', path.read_text("utf-8"))
    }
    assert written == {reason for _, reason, _ in REFUSING}


def test_names_are_unique_laws_in_kebab_case() -> None:
    assert len(BY_NAME) == len(RULES)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name) for name in BY_NAME)
    assert all(rule.law and rule.source and "\n" not in rule.law for rule in RULES)
