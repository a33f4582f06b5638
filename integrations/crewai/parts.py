"""What a crew and a flow are made of: the agents and methods beside the one that works."""

from __future__ import annotations

from cotune.integrations.crewai.scopes import CrewScope, role_of
from cotune.recording.app_parts import Part, Parts


def report_parts(parts: Parts, scope: CrewScope) -> None:
    """Report the agents of the crew, or the methods of the flow, that `scope` belongs to, and that it works."""
    parts.enter(scope.role)
    crew = getattr(scope.agent, "crew", None)
    if crew is not None:
        agents = [*crew.agents, *([crew.manager_agent] if crew.manager_agent is not None else ())]
        name = crew.name or "crew"
        parts.add(Part(role_of(agent), "agent", name, str(agent.role).strip()) for agent in agents)
    if scope.agent is None and scope.flow is not None:
        name = type(scope.flow).__name__
        parts.add(Part(str(method), "method", name, str(method)) for method in scope.flow._methods)
