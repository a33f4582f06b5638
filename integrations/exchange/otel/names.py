"""Names of attributes and events: OpenTelemetry's GenAI conventions, and cotune's own under `cotune.`.

The conventions are still in development. A test compares these names with the installed
opentelemetry-semantic-conventions.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
CHAT = "chat"
AGENT = "invoke_agent"
TOOL = "execute_tool"
WORKFLOW = "invoke_workflow"

PROVIDER = "gen_ai.provider.name"
WORKFLOW_NAME = "gen_ai.workflow.name"
AGENT_NAME = "gen_ai.agent.name"
CONVERSATION = "gen_ai.conversation.id"

REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
CHOICE_COUNT = "gen_ai.request.choice.count"
PARAMS = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "stop": "gen_ai.request.stop_sequences",
    "n": CHOICE_COUNT,
}
"""Request parameter in OpenAI form -> its attribute."""

OUTPUT_TYPE = "gen_ai.output.type"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"

TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"

EVALUATION = "gen_ai.evaluation.result"
EVALUATION_NAME = "gen_ai.evaluation.name"
EVALUATION_VALUE = "gen_ai.evaluation.score.value"
EVALUATION_EXPLANATION = "gen_ai.evaluation.explanation"

ERROR_TYPE = "error.type"

SPAN_KIND = "openinference.span.kind"
INPUT_VALUE = "input.value"
"""OpenInference's names for kind and input of a workflow's span, which Phoenix, Langfuse and LangSmith show."""

EPISODE = "cotune.episode.id"
TASK = "cotune.task.id"
TASK_INPUT = "cotune.task.input"
PHASE = "cotune.phase"
TRAINING_STEP = "cotune.training_step"
ROLLOUT = "cotune.rollout"
METRICS = "cotune.metrics"
CALL = "cotune.call.id"
ROLE = "cotune.role"
STEP = "cotune.step"
TURN = "cotune.turn"
PARENTS = "cotune.parents"
STATUS = "cotune.status"
CHOSEN = "cotune.chosen"
CANDIDATES = "cotune.candidates"
CANDIDATE = "cotune.candidate.index"
INTEGRATION = "cotune.integration"
ATTEMPTS = "cotune.attempts"
PROMPTS = "cotune.prompts.id"
UNEDITED = "cotune.prompts.unedited"
ASKED_MESSAGES = "cotune.asked.messages"
POLICY = "cotune.policy.name"
POLICY_VERSION = "cotune.policy.version"
PROMPT_IDS = "cotune.prompt.token_ids"
SAMPLED = "cotune.candidates.sampled"
