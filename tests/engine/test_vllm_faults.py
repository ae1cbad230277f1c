"""A vLLM server that is late, talks nonsense, refuses or dies: errors that name it, no hang, nothing invented."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from fake_vllm import NEW, OLD, Fake, grown, serving, talking

from headrace.engine import Request, UnusablePrompt
from headrace.engine.protocol import EngineDied, NotFinite
from headrace.engine.vllm import server_keeper
from headrace.engine.vllm.api import VllmApi, VllmError, VllmGone
from headrace.engine.vllm.engine import Unsupported
from headrace.engine.vllm.score import score
from headrace.engine.vllm.server import find_vllm, start
from headrace.engine.vllm.server_checks import check_abilities, try_generate
from headrace.engine.worker import EngineWorker
from headrace.observe import ProcessTimeline
from headrace.partial import Interrupt
from headrace.records import FinishReason, Rollout, Sampling, SamplingMask
from headrace.records.columns import pack_rollouts, pack_samplings
from headrace.settings import ConfigError

PROMPT = Rollout.from_prompt([3, 4, 5], id="r")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("garbage", "an answer that makes no sense"),
        ("failed", "call /inference/v1/generate, log server.log: status 500: EngineCore encountered an issue"),
        ("broken off", "/inference/v1/generate"),
    ],
)
async def test_a_server_that_fails_midway_ends_the_engine_and_says_where(over, fault, told):
    async with over(Fake(fault=fault)) as (engine, _):
        both = [asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=9))) for _ in range(3)]
        for error in await asyncio.gather(*both, return_exceptions=True):
            assert isinstance(error, EngineDied) and told in str(error) and "log server.log" in str(error)
            assert "vLLM at http://127.0.0.1" in str(error)
        with pytest.raises(EngineDied):
            await engine.generate(PROMPT, Sampling())
        with pytest.raises(EngineDied):
            await engine.pause(Interrupt.KEEP)
        assert engine.died.done()


@pytest.mark.parametrize(
    ("fault", "told"), [("refused", r"status 400: too long for me"), ("refused late", r"Requested sample logprobs of 300")]
)
async def test_what_the_server_refuses_also_after_the_stream_began_is_that_rollouts_failure_alone(over, fault, told):
    fake = Fake(fault=fault)
    async with over(fake) as (engine, _):
        with pytest.raises(UnusablePrompt, match=rf"'r'.*{told}"):
            await engine.generate(PROMPT, Sampling(max_tokens=9))
        fake.fault = ""
        assert (await engine.generate(PROMPT, Sampling(max_tokens=4))).num_sampled == 4


async def test_an_answer_that_no_rollout_can_hold_ends_the_engine_and_hangs_nobody(over):
    async with over(Fake(logprob=0.7)) as (engine, _):
        with pytest.raises(EngineDied, match="its answer could not be read"):
            await engine.generate(PROMPT, Sampling(max_tokens=4))


async def test_a_mask_that_leaves_out_what_could_have_been_drawn_is_no_mask(over):
    """The logprobs that came hold less than all of the probability."""
    fake = Fake(logprob=-1.0, candidates=((50, -1.5), (51, -2.5)))
    async with over(fake) as (engine, _):
        with pytest.raises(UnusablePrompt, match=r"the 3 tokens that came with a logprob have a probability of 0\.6731"):
            await engine.generate(PROMPT, Sampling(max_tokens=4, top_p=0.9))
        fake.candidates = ((50, float(np.log(1 - np.exp(-1.0)))), (51, -9999.0))
        rollout = await engine.generate(PROMPT, Sampling(max_tokens=4, top_p=0.9))
        assert [sorted(rollout.sampling_mask.row(3 + place)) for place in range(4)] == [[10 + place, 50] for place in range(4)]


WIDE = (*((100 + each, float(np.log(0.01))) for each in range(100)), (5, -9999.0))
"""More tokens than are requested at first."""


async def test_a_token_with_more_candidates_than_came_is_sampled_again_with_more(over):
    fake = Fake(logprob=-4.6, candidates=WIDE)
    async with over(fake) as (engine, _):
        sampling = Sampling(max_tokens=20, min_tokens=10, stop_ids=(7,), top_p=0.9)
        increments = [each async for each in engine.stream(PROMPT, sampling)]
        assert [each.finish_reason for each in increments] == [None] * 19 + [FinishReason.LENGTH]
        asked = [body for path, body in fake.asked if path == "generate"]
        part = [(body["sampling_params"]["logprobs"], body["sampling_params"]["max_tokens"]) for body in asked]
        assert part == [(64, 20), (200, 8), (64, 12), (200, 8), (64, 4), (200, 4)]
        assert [body["sampling_params"]["min_tokens"] for body in asked] == [10, 8, 2, 2, 0, 0]
        assert [body["token_ids"][3:] for body in asked] == [[]] * 2 + [[*range(10, 18)]] * 2 + [[*range(10, 18)] * 2] * 2
        seeds = [body["sampling_params"]["seed"] for body in asked]
        assert seeds[0::2] == seeds[1::2] and len(set(seeds)) == 3, "the same tokens before it, the same random numbers"
        rollout = await engine.generate(PROMPT, Sampling(max_tokens=20, top_p=0.9))
        assert rollout.num_sampled == 20 and len(rollout.calls) == 1
        forbidden = [~token for token in range(200) if token < 100 and token != rollout.token_ids[-1]]
        assert rollout.sampling_mask.row(22).tolist() == forbidden, "the shorter of the two forms"


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("interrupt", [Interrupt.KEEP, Interrupt.ABORT])
async def test_calls_that_ask_for_more_candidates_have_the_versions_that_sampled_them(over, version, interrupt):
    fake = Fake(version=version, logprob=-4.6, candidates=WIDE)
    async with over(fake) as (engine, publish):
        call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=50, top_p=0.9)))
        for number in (1, 2) if interrupt is Interrupt.KEEP else (1,):
            await grown(engine, 15 * number)
            await publish(number, interrupt=interrupt)
        rollout = await call
        asked = [body["sampling_params"]["logprobs"] for path, body in fake.asked if path == "generate"]
        kept = [name for number, part in zip(asked, fake.is_sampled_by, strict=True) if number == 200 for name in part]
        if interrupt is Interrupt.ABORT:
            assert rollout.finish_reason is FinishReason.ABORT and set(rollout.versions[3:]) == {0}
        else:
            assert rollout.num_sampled == 50 and set(rollout.versions[3:]) == {0, 1, 2}
            assert rollout.versions[3:].tolist() == [int(name.rpartition(":")[2]) for name in kept]


async def test_what_min_tokens_forbids_is_recorded(over):
    async with over(Fake()) as (engine, _):
        sampling = Sampling(max_tokens=4, min_tokens=2, stop_ids=(3, engine.vocabulary + 7))
        rollout = await engine.generate(PROMPT, sampling)
        assert [rollout.sampling_mask.row(3 + place).tolist() for place in range(4)] == [[~3], [~3], [], []]
        dropped = await engine.generate(PROMPT, dataclasses.replace(sampling, keep_mask=False))
        assert dropped.sampling_mask is None


@pytest.mark.parametrize(("row", "allowed"), [([~1, ~3], [0, 2]), ([0, 2], [0, 2]), ([], [0, 1, 2, 3])], ids=str)
def test_scores_are_of_what_could_be_sampled(row, allowed):
    logprobs = {token: float(np.log(share)) for token, share in enumerate((0.1, 0.2, 0.3, 0.4))}

    class Api:
        async def prompt_logprobs(self, token_ids, *, salt, whole, adapter):
            return np.asarray([0.0, logprobs[2]], np.float32), [logprobs] if whole else []

    mask = SamplingMask.from_rows([np.zeros(0, int), np.asarray(row, int)])
    rollout = Rollout.from_prompt([0, 2], id="r").replace(sampling_mask=mask)
    found = asyncio.run(score(Api(), rollout, salt="", may_ask_for_all=True))
    expected = 0.3 / sum(np.exp(logprobs[token]) for token in allowed)
    np.testing.assert_allclose(found[1], np.log(expected), rtol=1e-5)


async def test_a_call_cancelled_before_it_is_sent_gives_its_slot_back(over):
    async with over(Fake()) as (engine, _):
        requests = [Request(PROMPT, Sampling(max_tokens=4), on_done=print) for _ in range(engine.num_slots)]
        engine.submit(requests, print)
        engine.cancel(requests)
        assert (await engine.generate(PROMPT, Sampling(max_tokens=4))).num_sampled == 4
        assert (await engine.state()).running == 0


async def test_an_idle_spell_is_no_silence(over):
    async with over(Fake(pace=0.08), patience=2.5) as (engine, _):
        await asyncio.sleep(3.0)
        assert (await engine.generate(PROMPT, Sampling(max_tokens=30))).num_sampled == 30
        assert not engine.died.done()


async def test_two_loads_come_one_after_the_other_and_a_cancelled_one_is_brought_to_its_end(over):
    """Half of one would leave a server that stands still, or weights that nobody can name."""
    fake = Fake()
    async with over(fake) as (engine, publish):
        await asyncio.gather(publish(1), publish(2))
        reloads = [place for place, (path, _) in enumerate(fake.asked) if path == "/collective_rpc"]
        resumes = [place for place, (path, _) in enumerate(fake.asked) if path == "/resume"]
        assert len(reloads) == 3 and resumes[-2] < reloads[-1], "the first was over when the second began"
        for delay in (0.0, 0.01, 0.02, 0.04, 0.08):
            version = engine.version + 1
            loading = asyncio.ensure_future(publish(version))
            await asyncio.sleep(delay)
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            rollout = await asyncio.wait_for(engine.generate(PROMPT, Sampling(max_tokens=3)), 20)
            assert set(rollout.versions[3:].tolist()) == {engine.version} and fake.weight_version == f"life:{engine.version}"


async def test_a_drain_ends_with_a_server_that_has_lost_a_call(over):
    async with over(Fake(fault="silent"), patience=0.5) as (engine, _):
        call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=4)))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineDied, match=r"none has grown for 0.5 s"):
            await engine.pause(Interrupt.DRAIN)
        with pytest.raises(EngineDied):
            await call


async def test_a_silent_server_is_given_up(over):
    async with over(Fake(fault="silent"), patience=0.5) as (engine, _):
        began = time.monotonic()
        with pytest.raises(
            EngineDied, match=r"1 rollouts are in flight and none has grown for 0.5 s \(engine.vllm.answer_seconds\)"
        ):
            await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version", "/resume"])
async def test_a_failure_in_the_middle_of_an_update_ends_the_engine(over, path):
    """Nobody can tell what the server runs then."""
    fake = Fake()
    async with over(fake) as (engine, publish):
        call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=60)))
        await grown(engine, 3)
        fake.failing.add(path)
        with pytest.raises(EngineDied, match=rf"{path}.*status 500: the disk is full"):
            await publish(1)
        with pytest.raises(EngineDied):
            await call


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("interrupt", sorted({*Interrupt} - {Interrupt.LEASE}))
async def test_every_release_stamps_what_was_drawn_before_and_after(over, version, interrupt):
    """An old one says nothing of versions, and ends an aborted stream without a word."""
    fake = Fake(version=version)
    async with over(fake) as (engine, publish):
        call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=40)))
        await grown(engine, 5)
        drawn_before = (await engine.in_flight())[0].num_sampled
        await publish(1, interrupt=interrupt)
        rollout = await call
        versions = rollout.versions[3:]
        assert np.array_equal(rollout.token_ids[3:], 10 + np.arange(len(versions))) and (np.diff(versions) >= 0).all()
        assert (versions[:drawn_before] == 0).all()
        if interrupt is Interrupt.ABORT:
            assert rollout.finish_reason is FinishReason.ABORT and (versions == 0).all() and len(versions) < 40
        else:
            assert len(versions) == 40 and versions[-1] == (0 if interrupt is Interrupt.DRAIN else 1)
        later = await engine.generate(rollout, Sampling(max_tokens=2))
        assert (later.versions[-2:] == 1).all()
        salts = [body["cache_salt"] for name, body in fake.asked if name == "generate"]
        assert salts == ["life:0", "life:1"], "no call may find keys and values of older weights"
        assert (("/reset_prefix_cache", {"reset_running_requests": "true"}) in fake.asked) == (interrupt is Interrupt.RETRACT)
        seeds = [body["sampling_params"]["seed"] for name, body in fake.asked if name == "generate"]
        assert seeds[0] != seeds[1], "what goes on must not draw with the same numbers again"


@pytest.mark.parametrize("logprob", [-9999.0, None], ids=[NEW, OLD])
async def test_logits_that_are_not_numbers_fail_what_runs_and_the_server_is_begun_anew_with_the_next_weights(over, logprob):
    """What it computed stays in its cache, and vLLM lets it into what comes later."""
    async with over(Fake(logprob=logprob)) as (engine, publish):
        with pytest.raises(NotFinite, match="'r'"):
            await engine.generate(PROMPT, Sampling(max_tokens=4))
        with pytest.raises(EngineDied, match="its KV cache holds NaN; it must be restarted"):
            await publish(1)


async def test_all_weights_are_not_kept_in_two_versions(over):
    async with over(Fake()) as (engine, publish):
        with pytest.raises(Unsupported, match="'lease' keeps versions of an adapter, and all weights are trained"):
            await publish(1, interrupt=Interrupt.LEASE)
        assert engine.version == 0 and not engine.died.done()


async def test_it_scores_while_paused_only_where_nothing_would_go_on(over):
    async with over(Fake()) as (engine, _):
        call = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=30)))
        await grown(engine, 3)
        await engine.pause(Interrupt.KEEP)
        with pytest.raises(Unsupported, match="keeps 1 rollouts paused; resume it first"):
            await engine.score([PROMPT])
        await engine.resume()
        await call


@pytest.mark.parametrize(("version", "come"), [(OLD, [10, 11, 12]), (NEW, [10])], ids=[OLD, NEW])
async def test_a_server_that_dies_leaves_what_had_come_and_refuses_nothing(over, version, come):
    """To whoever sent it work over streams: what is lost there goes on elsewhere, from the last token that is known. Servers
    that name versions tell several tokens at a time, after the first."""
    async with over(Fake(version=version, fault="broken off", pace=0.02)) as (engine, _):
        told = []

        class Data:
            def notify(self, name, value):
                told.append((name, value))

        worker = EngineWorker(engine, timeline=ProcessTimeline("engine"))
        worker.attach(Data())
        rollouts, samplings = pack_rollouts([PROMPT]), pack_samplings([Sampling(max_tokens=9)])
        work = {"keys": np.asarray([7]), "rollouts": rollouts, "samplings": samplings, "held": [None], "streamed": []}
        worker.notices()["work"](work)
        while not engine.died.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert [name for name, _ in told if name in ("sampled", "refused", "done")] == ["sampled"]
        sampled = dict(told)["sampled"]
        assert sampled["calls"][0][:2] == [7, len(come)] and sampled["tokens"][:, 0].tolist() == come


def pieces_of(fake):
    return [body["sampling_params"].get("stream_interval", 1) for name, body in fake.asked if name == "generate"]


@pytest.mark.parametrize(("version", "every"), [(OLD, 1), (NEW, 16)], ids=[OLD, NEW])
async def test_tokens_come_together_only_from_a_server_that_names_their_weights(over, version, every):
    fake = Fake(version=version, holds_at=20)
    async with over(fake) as (engine, publish):
        growing = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=40)))
        await grown(engine, 17)
        await publish(1)
        fake.holds_at = -1
        rollout = await growing
        drawn = rollout.versions[3:].tolist()
        assert drawn == sorted(drawn) and set(drawn) == {0, 1}
        assert [f"life:{each}" for each in drawn] == fake.is_sampled_by[-1]
        async for _ in engine.stream(PROMPT, Sampling(max_tokens=2)):
            pass
        assert pieces_of(fake) == [every, 1]


@pytest.mark.parametrize("interrupt", sorted({*Interrupt} - {Interrupt.LEASE}))
async def test_an_old_server_that_tells_tokens_together_is_not_updated_under_what_goes_on(over, interrupt):
    async with over(Fake(version=OLD, pace=0.01), tells_late=True) as (engine, publish):
        growing = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=20)))
        await grown(engine, 1)
        if interrupt in (Interrupt.KEEP, Interrupt.RETRACT):
            with pytest.raises(Unsupported, match=r"needs a vLLM that names the weights of every token \(0.32\)"):
                await publish(1, interrupt=interrupt)
            assert engine.version == 0 and set((await growing).versions[3:].tolist()) == {0}
            await publish(1, interrupt=interrupt)
        else:
            await publish(1, interrupt=interrupt)
            assert set((await growing).versions[3:].tolist()) == {0}
        assert engine.version == 1 and not engine.died.done()


@pytest.mark.parametrize("sampling", [{}, {"stop": ("never",)}], ids=["plain", "stop string"])
@pytest.mark.parametrize("version", [OLD, NEW])
async def test_tokens_that_come_together_by_chance_are_of_the_weights_that_run(over, version, sampling):
    """A server that is behind, or that guesses ahead, tells several at once of what has all been drawn since the update."""
    fake = Fake(version=version, together=2, holds_at=10, fault="" if version == OLD else "unnamed")
    async with over(fake, decode=str) as (engine, publish):
        reading = engine.stream(PROMPT, Sampling(max_tokens=20, **sampling))
        told = [await anext(reading)]
        await grown(engine, 9)
        await publish(1)
        fake.holds_at = -1
        told += [each async for each in reading]
        versions = [version for each in told for version in each.versions]
        assert versions == [int(name.removeprefix("life:")) for name in fake.is_sampled_by[-1]] and len(versions) == 20


async def test_a_server_that_leaves_out_which_weights_drew_tokens_it_told_together_counts_as_dead(over):
    fake = Fake(fault="unnamed", holds_at=20)
    async with over(fake) as (engine, publish):
        growing = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=40)))
        await grown(engine, 17)
        await publish(1)
        fake.holds_at = -1
        with pytest.raises(EngineDied, match="ended a call without naming the weights of it"):
            await growing


async def test_a_call_that_is_ended_here_ends_before_tokens_whose_weights_are_not_known(over):
    fake = Fake(fault="unnamed", holds_at=20)
    async with over(fake) as (engine, publish):
        growing = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=60)))
        await grown(engine, 17)  # the first, and sixteen
        await publish(1)
        fake.holds_at = 40
        await grown(engine, 33)  # of the second sixteen, three are of the old weights
        assert (await engine.in_flight())[0].num_sampled == 17
        await engine.pause(Interrupt.ABORT)
        rollout = await growing
        assert rollout.num_sampled == 17 and set(rollout.versions[3:].tolist()) == {0}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, r"the logprobs of another distribution than it samples from.*--logprobs-mode"),
        ({"fault": "refused"}, "status 400: too long for me"),
        ({"most_candidates": 8}, "max allowed: 8; it must be started with --max-logprobs 16 or more"),
    ],
    ids=["mode", "refused", "few"],
)
async def test_a_server_that_gives_other_logprobs_than_it_draws_from_is_refused(settings, problem):
    async with serving(Fake(**settings)) as url, talking(url) as api:
        with pytest.raises(ConfigError, match=problem):
            await try_generate(api, 16, num_candidates=100)


async def test_no_call_is_sent_over_a_connection_that_the_server_may_be_closing():
    fake = Fake()
    async with serving(fake) as url, talking(url) as api:
        for call in (api.context, api.resume, api.is_up, api.resume):
            await call()
    assert len(fake.connections) == len(set(map(id, fake.connections))) == 4


def test_a_question_whose_connection_breaks_is_asked_once_more_and_a_command_is_not():
    fake = Fake()

    async def asked(call, *, resets):
        fake.asked, fake.resets = [], resets
        async with serving(fake) as url, talking(url) as api:
            return await call(api)

    for ask in (VllmApi.is_up, VllmApi.context, VllmApi.num_workers, VllmApi.about):
        assert asyncio.run(asked(ask, resets=1))
    assert not asyncio.run(asked(VllmApi.is_up, resets=2))
    for ask, resets in ((VllmApi.context, 2), (VllmApi.resume, 1), (lambda api: api.reload("folder"), 1)):
        with pytest.raises(VllmGone, match="vLLM at"):
            asyncio.run(asked(ask, resets=resets))
        assert len(fake.asked) == resets and not fake.resets, "once more at the most, and of a command nothing is repeated"


def test_a_question_that_finds_no_connection_is_asked_once_more_and_a_command_is_not(monkeypatch):
    async def main(call, *, opens):
        pauses = []
        runner = web.AppRunner(Fake().app())
        await runner.setup()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]

        async def pause(seconds):
            pauses.append(seconds)
            if opens:
                await web.TCPSite(runner, "127.0.0.1", port).start()

        monkeypatch.setattr(asyncio, "sleep", pause)
        try:
            async with talking(f"http://127.0.0.1:{port}") as api:
                return await call(api), len(pauses)
        finally:
            await runner.cleanup()

    for ask in (VllmApi.is_up, VllmApi.context):
        answer, num_pauses = asyncio.run(main(ask, opens=True))
        assert answer and num_pauses == 1
    assert asyncio.run(main(VllmApi.is_up, opens=False)) == (False, 1)
    for call in (VllmApi.context, VllmApi.resume):
        with pytest.raises(VllmGone, match="vLLM at"):
            asyncio.run(main(call, opens=call is VllmApi.resume))


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/inference/v1/generate"])
async def test_what_a_release_lacks_is_refused_by_name(path):
    fake = Fake(paths=tuple(each for each in Fake().paths if each != path))
    async with serving(fake) as url, talking(url) as api:
        about = await api.about()
        with pytest.raises(ConfigError, match=rf"vLLM {NEW} at {url} cannot do what this run needs: .*\(vLLM 0.1\d can\)$"):
            check_abilities(about, server=url)


def test_an_interpreter_without_vllm_or_none_at_all_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"has no vLLM; install vLLM in an environment and name its interpreter"):
        find_vllm(sys.executable)
    with pytest.raises(ConfigError, match=r"engine.vllm.python = '/nowhere/python' is no interpreter that runs"):
        find_vllm("/nowhere/python")


PRETENDER = """#!{python}
import sys, time
if "-c" in sys.argv:
    print("/nowhere/vllm")
    sys.exit(0)
{body}
"""


@pytest.mark.parametrize(
    ("body", "seconds", "told"),
    [
        (
            "print('ValueError: Head size 16 is not supported'); sys.exit(1)",
            60,
            "did not start: ValueError: Head size 16 is not",
        ),
        ("sys.exit(3)", 60, "did not start: it ended without an error message"),
        ("time.sleep(600)", 1, r"did not come up within 1 s \(engine.vllm.start_seconds\)"),
    ],
)
def test_a_server_that_does_not_come_up_says_why(tmp_path, body, seconds, told):
    python = tmp_path / "python"
    python.write_text(PRETENDER.format(python=sys.executable, body=body))
    python.chmod(0o755)
    began = time.monotonic()
    with pytest.raises(VllmError, match=rf"{told}.*log {tmp_path}/server.log"):
        asyncio.run(start("model", [], python=str(python), log=tmp_path / "server.log", seconds=seconds))
    assert time.monotonic() - began < 50


def test_what_a_server_leaves_in_its_temporary_folder_goes_with_it(tmp_path):
    """vLLM removes neither its sockets nor its rendezvous files."""
    python = tmp_path / "python"
    body = """
import os, socket, tempfile
socket.socket(socket.AF_UNIX).bind(os.environ["VLLM_RPC_BASE_PATH"] + "/00000000-0000-0000-0000-000000000000")
tempfile.mkstemp(prefix="vllm_dist_")
assert sys.argv[sys.argv.index("--uds") + 1] == tempfile.gettempdir() + "/http"
assert os.stat(tempfile.gettempdir()).st_mode & 0o77 == 0
assert "--port" not in sys.argv, "vLLM guards the paths that change weights by no token"
print("ValueError:", tempfile.gettempdir(), sorted(os.listdir(tempfile.gettempdir())))
sys.exit(1)
"""
    python.write_text(PRETENDER.format(python=sys.executable, body=body))
    python.chmod(0o755)
    with pytest.raises(VllmError) as failed:
        asyncio.run(start("model", [], python=str(python), log=tmp_path / "server.log", seconds=60, prefix="headrace-1-mine"))
    said = re.search(r"ValueError: (\S+) \['00000000-.*', 'vllm_dist_.*'\]", str(failed.value))
    assert said and Path(said[1]).name.startswith("headrace-1-mine-") and not Path(said[1]).exists(), failed.value


STUBBORN = """
import os, signal, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
shared = ""
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "child"])
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = SharedMemory(create=True, size=64)
    shared = memory.name
print(os.getpid(), shared, flush=True)
time.sleep(600)
"""


def test_nothing_of_a_server_outlives_who_started_it(tmp_path):
    """Not even what it started and what does not heed a request to end, nor the shared memory of that."""
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    keeper = tmp_path / "keep.py"  # with less patience
    keeper.write_text(Path(server_keeper.__file__).read_text().replace("_PATIENCE = 8.0", "_PATIENCE = 0.5"))
    folder = tmp_path / "files"
    command = [sys.executable, str(keeper), str(folder), sys.executable, str(script)]
    starter = f"""
import subprocess, time
process = subprocess.Popen({command!r}, stdin=subprocess.PIPE)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(2)]
        left = [Path("/proc", line[0]) for line in lines] + [Path("/dev/shm", *line[1:]) for line in lines if line[1:]]
        left.append(folder)
        assert len(left) == 4 and all(path.exists() for path in left)
        process.kill()
        until = time.monotonic() + 60
        while any(path.exists() for path in left) and time.monotonic() < until:
            time.sleep(0.05)
        assert not [path for path in left if path.exists()]


def test_a_keeper_that_is_told_to_end_ends_its_server(tmp_path):
    folder = tmp_path / "files"
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, server_keeper.__file__, str(folder), sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        child = Path("/proc", keeper.stdout.readline().strip())
        assert child.exists() and folder.exists()
        keeper.terminate()
        keeper.wait(30)
        assert not child.exists() and not folder.exists()
