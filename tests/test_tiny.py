"""The built-in checkpoint: it is a real V4, it says what it learned, and the engine serves it under any schedule."""

import json
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from schedules import TINY, random_case

from leadline import LLM, SamplingParams
from leadline.chat import ChatFormat
from leadline.checkpoint.loader import Slot, load
from leadline.checkpoint.reader import Checkpoint
from leadline.cli.eval import answer_room, token_measure
from leadline.config import ModelConfig, Ratio
from leadline.engine.loading import BUILT_IN
from leadline.reference import Indexer, Reference
from leadline.tasks.suite import dialogue, tasks
from leadline.tasks.task import mark, read_answer

GREEDY = SamplingParams(temperature=0, max_tokens=60)
STORY = (
    "Once upon a time, in a little house at the edge of a forest, there lived a young rabbit. His name was Max. "
    "Max was very kind, and everyone knew it. Every morning he ate honey and looked out of the window. More than "
    "anything Max loved his red boat. It had belonged to his grandmother. His best friend was a wise hen named Nora. "
    "They did everything together.\n\nOne grey autumn afternoon, Nora the hen came to stay. She saw the red boat and "
    'wanted it. "Let me have it!" said Nora. "No," said Max, "it is mine!" They pulled with all their might, and '
    'crack! The boat broke into five pieces.\n\nBoth of them began to cry. At last Max went to Nora and said, "I am '
    'sorry. Let us make a new one." They worked side by side, and the boat was as good as new.'
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The shipped weights in the reference, with native rounding."""
    config = ModelConfig.from_folder(BUILT_IN)
    built = Reference(config, native=True).eval().requires_grad_(False)
    slots = {}
    for name, value in built.state_dict().items():
        if ".experts.w" in name:
            prefix, matrix = name.rsplit(".", 1)
            slots |= {f"{prefix}.{i}.{matrix}.weight": Slot(value[i]) for i in range(len(value))}
        else:
            slots[name] = Slot(value)
    load(config, slots, Checkpoint(BUILT_IN))
    return built


def test_it_is_a_small_real_v4_in_the_official_format() -> None:
    config = ModelConfig.from_folder(BUILT_IN)
    assert {Ratio.SWA, Ratio.CSA, Ratio.HCA} == set(config.compress_ratios)
    assert 0 < config.num_hash_layers < config.num_hidden_layers and config.num_draft_layers == 1
    checkpoint = Checkpoint(BUILT_IN)
    checkpoint.validate(config)
    assert (checkpoint.format.dense, checkpoint.format.experts, checkpoint.format.scales) == ("fp8", "fp4", "e8m0")
    files = list(BUILT_IN.iterdir())
    assert sum(file.stat().st_size for file in files) < 20e6 and max(file.stat().st_size for file in files) < 16 << 20
    raw = json.loads((BUILT_IN / "config.json").read_text())
    assert raw["quantization_config"]["quant_method"] == "fp8"


def test_it_writes_stories_and_does_sums(llm: LLM) -> None:
    questions = {"What is 15 + 27?": "15 + 27 = 42", "What is 61 + 30?": "61 + 30 = 91", "What is 3 + 6?": "3 + 6 = 9"}
    prompts = [f"<｜User｜>{question}<｜Assistant｜></think>" for question in questions]
    answers = llm.generate(prompts, GREEDY)
    assert [answer.text for answer in answers] == list(questions.values())
    assert {answer.finish_reason for answer in answers} == {"stop"}
    (story,) = llm.generate("Once upon a time", GREEDY)
    assert "there lived" in story.text and story.finish_reason == "length"
    assert story.prompt_token_ids[0] == 0, "BOS precedes a text"


def test_compressed_layers_carry_what_the_window_cannot(reference: Reference) -> None:
    """Held-out loss with entries is far below that with the window alone; names come back from beyond the window."""
    ids = torch.tensor([[0, *LLM().tokenizer.encode(STORY).ids]])
    losses = [
        F.cross_entropy(reference(ids, window_only=hidden)[0, 64:-1], ids[0, 65:]).item() for hidden in (False, True)
    ]
    assert losses[0] < 0.8 and losses[1] > losses[0] + 0.1


def test_indexers_are_copies_of_the_attention_whose_choice_they_make(reference: Reference) -> None:
    chosen = [layer.attn for layer in reference.layers if layer.attn.ratio == Ratio.CSA]
    assert chosen
    for attention in chosen:
        indexer, heads = attention.indexer, reference.config.num_attention_heads
        assert torch.equal(indexer.wq_b.weight[: len(attention.wq_b.weight)], attention.wq_b.weight)
        assert not indexer.weights_proj.weight[heads:].any() and indexer.weights_proj.weight[:heads].any()
        for name, value in attention.compressor.named_parameters():
            assert torch.equal(indexer.compressor.get_parameter(name), value), name


def recalled(reference: Reference, ids: list[int]) -> float:
    """The share of a dialogue's answers, each between `</think>` (6) and EOS (1), that are said in every token."""
    choices = [ids[0], *reference(torch.tensor([ids]))[0].argmax(-1).tolist()]
    starts = [place + 1 for place, token in enumerate(ids) if token == 6][:-1]  # the last one is not answered
    answers = [slice(start, ids.index(1, start) + 1) for start in starts]
    assert len(answers) == 23
    return float(np.mean([choices[answer] == ids[answer] for answer in answers]))


def test_recall_hangs_on_what_the_indexers_choose(
    reference: Reference, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a list of 200 entries, the 8 that the indexers choose hold the answers; 8 random ones hardly ever do."""
    format = ChatFormat(llm.tokenizer, llm.engine.model.eos_token_ids)
    ids = format.prompt(dialogue("recall", 5, 0, 800, token_measure(llm), turns=24).body(23)).token_ids.tolist()
    assert recalled(reference, ids) >= 0.95
    choose, generator = Indexer.choose, torch.Generator().manual_seed(0)

    def at_random(indexer: Indexer, scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        return choose(indexer, torch.rand(scores.shape, generator=generator), visible)

    monkeypatch.setattr(Indexer, "choose", at_random)
    assert recalled(reference, ids) <= 0.4


def test_the_mtp_block_drafts_what_the_model_chooses(reference: Reference) -> None:
    ids = torch.tensor([[0, *LLM().tokenizer.encode(STORY).ids]])
    logits, drafts = reference.forward_with_draft(ids)
    agreed = (drafts[0, :-1].argmax(-1) == logits[0, 1:-1].argmax(-1)).float().mean()
    assert agreed >= 0.6


@pytest.mark.parametrize("numerics", ["exact", "native"])
def test_the_engine_agrees_with_the_reference_on_the_shipped_weights(numerics: str, reference: Reference) -> None:
    """Per-token log-probabilities of a story; native rounding may flip a value on the edge, so its mean is compared."""
    engine = LLM(numerics=numerics)
    ids = [0, *engine.tokenizer.encode(STORY).ids]
    (result,) = engine.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    got = np.array([entry.logprob for entry in result.prompt_logprobs[1:]])
    exact = Reference(reference.config)
    exact.load_state_dict(reference.state_dict())
    judge = exact if numerics == "exact" else reference
    with torch.no_grad():
        scores = judge(torch.tensor([ids]))[0].log_softmax(-1)
    expected = scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    if numerics == "exact":
        np.testing.assert_allclose(got, expected, atol=2e-4)
    else:
        assert np.median(np.abs(got - expected)) < 1e-4 and np.abs(got - expected).mean() < 0.02


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
@pytest.mark.parametrize("kind", TINY)
def test_any_schedule_gives_what_each_request_gives_alone(kind: str, seed: int) -> None:
    random_case(kind, seed)


@pytest.mark.parametrize("dtype", ["checkpoint", "float64"])
def test_other_dtypes_give_the_same_tokens(dtype: str, llm: LLM) -> None:
    """fp8 and fp4 kept as stored and expanded at each use, or expanded once into fp64, against once into fp32."""
    other = LLM(dtype=dtype)
    prompt = "<｜User｜>Tell me a story about a fox named Nora.<｜Assistant｜></think>"
    assert other.generate(prompt, GREEDY)[0].token_ids == llm.generate(prompt, GREEDY)[0].token_ids


def test_a_long_list_of_prompts_comes_back_in_order(llm: LLM) -> None:
    prompts = [f"<｜User｜>What is {i} + {2 * i}?<｜Assistant｜></think>" for i in range(1, 25)]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16))
    for i, result in enumerate(results, start=1):
        assert result.text.startswith(f"{i} + {2 * i} = ")
    assert llm.stats().running == 0 and not llm.engine.problems()


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    (free,) = llm.generate("Once upon a time", GREEDY)
    stop = free.text[40:46]
    params = SamplingParams(temperature=0, max_tokens=60, stop=[stop, "never said"])
    (cut,) = llm.generate("Once upon a time", params)
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.choices[0].stop_reason) == ("stop", stop)
    pieces = [update.text for update in llm.stream("Once upon a time", params)]
    assert "".join(pieces) == cut.text


def test_bad_words_are_never_said(llm: LLM) -> None:
    (free,) = llm.generate("Once upon a time", GREEDY)
    word = next(word for word in free.text.split() if word.isalpha() and len(word) > 5)
    (clean,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=60, bad_words=[word]))
    assert word in free.text and word not in clean.text


def test_native_numerics_round_and_cost_next_to_nothing(llm: LLM) -> None:
    ids = [0, *llm.tokenizer.encode(STORY).ids]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    means = []
    for engine in (llm, LLM(numerics="native")):
        (result,) = engine.generate([ids], params)
        means.append(float(np.mean([entry.logprob for entry in result.prompt_logprobs[1:]])))
    assert means[0] != means[1] and abs(means[0] - means[1]) < 0.05


@pytest.mark.parametrize(
    ("kind", "length", "least"),
    [
        ("recall", 128, 12),
        ("recall", 1000, 11),
        ("system", 64, 11),
        ("copy", 32, 11),
        ("arithmetic", 0, 11),
        ("stop", 0, 10),
        ("tool", 0, 10),
    ],
)
def test_it_answers_tasks_of_seeds_that_it_never_saw(kind: str, length: int, least: int) -> None:
    """Greedily in native numerics, 12 tasks of a kind: what one run of `leadline eval` gives, less one or two."""
    llm = native()
    format, measure = ChatFormat(llm.tokenizer, llm.engine.model.eos_token_ids), token_measure(llm)
    asked = tasks(kind, 0, 12, length, measure)
    prompts = [format.prompt(task.body) for task in asked]
    params = [SamplingParams(temperature=0, max_tokens=answer_room(task.expected, measure)) for task in asked]
    results = llm.generate([prompt.token_ids for prompt in prompts], params)
    right = [
        mark(task, read_answer(format, prompt, result.token_ids, result.finish_reason))
        for task, prompt, result in zip(asked, prompts, results, strict=True)
    ]
    assert sum(right) >= least


@cache
def native() -> LLM:
    return LLM(numerics="native")
