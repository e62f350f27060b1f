"""Facts of a search, kept in memory instead of a database."""

from korch.costs.rates import Rates


class Facts:
    """Keeps facts by name, like the database of a meter; one machine measures."""

    machines = 1

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}

    def rates(self) -> Rates:
        """Return rates that no bound depends on."""
        return Rates()

    def fact(self, name: str) -> str | None:
        """Return a fact; None if there is none of this name."""
        return self.facts.get(name)

    def put_fact(self, name: str, value: str) -> None:
        """Keep a fact."""
        self.facts[name] = value
