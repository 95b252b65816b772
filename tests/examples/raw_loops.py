"""The loops of the ports in plain torch: one process, the models and the drawn numbers of the examples, nothing else.

Each takes the batches of its run, and yields the loss of each update. What the examples draw at random comes in.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F


def clipped(params, optimizer, total):
    optimizer.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    return total.item()


def dpo(example, batches):
    torch.manual_seed(0)
    policy = example.build()
    reference = copy.deepcopy(policy)
    params = list(policy.parameters())
    optimizer = torch.optim.AdamW(params, 1e-3)
    for batch in batches:
        found = {}
        for name, model in (("policy", policy), ("reference", reference)):
            sums = {}
            for kind in ("chosen", "rejected"):
                logits = model(batch[kind][:, :-1]).log_softmax(-1)
                picked = logits.gather(-1, batch[kind][:, 1:, None]).squeeze(-1)
                sums[kind] = picked[:, example.PROMPT - 1 :].sum(1)
            found[name] = sums["chosen"] - sums["rejected"]
        loss = -F.logsigmoid(example.BETA * (found["policy"] - found["reference"].detach())).mean()
        yield clipped(params, optimizer, loss), policy


def contrastive(example, batches):
    torch.manual_seed(0)
    model = example.Encoders()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for upper, lower in batches:
        one, two = F.normalize(model.upper(upper), dim=-1), F.normalize(model.lower(lower), dim=-1)
        logits, pair = model.scale.exp() * one @ two.T, torch.arange(len(one))
        loss = (F.cross_entropy(logits, pair) + F.cross_entropy(logits.T, pair)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), model


def teachers(example, batches, drawn):
    torch.manual_seed(0)
    student = example.Net()
    teacher = copy.deepcopy(student)
    optimizer = torch.optim.AdamW(student.parameters(), 3e-3)
    centre = torch.zeros(example.CLASSES)
    for step, (x, _) in enumerate(batches):
        views = [x * mask for mask in drawn[step]]
        temperature = 0.03 + 0.01 * min(step / 100, 1.0)
        with torch.no_grad():
            answers = [teacher(view) for view in views]
            targets = [F.softmax((answer - centre) / temperature, -1) for answer in answers]
        guesses = [F.log_softmax(student(view) / 0.1, -1) for view in views]
        loss = -sum((targets[at] * guesses[1 - at]).sum(-1).mean() for at in range(2)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept = (
            1.0 + (0.95 - 1.0) * (1 + torch.cos(torch.tensor(step / 300 * torch.pi, dtype=torch.float64))) / 2
        )
        with torch.no_grad():
            for own, new in zip(teacher.parameters(), student.parameters(), strict=True):
                own.mul_(float(kept)).add_(new, alpha=1 - float(kept))
            centre = 0.9 * centre + 0.1 * torch.cat(answers).mean(0)
        yield loss.item(), torch.nn.ModuleDict({"student": student, "teacher": teacher})


def diffusion(example, batches, drawn):
    torch.manual_seed(0)
    model = example.Denoiser()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, 2e-3)
    for x, (level, noise) in zip(batches, drawn, strict=True):
        kept = example.KEPT[level].unsqueeze(1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        yield clipped(params, optimizer, F.mse_loss(model(noisy, level), noise)), model


def grpo(example, batches, uniforms):
    torch.manual_seed(0)
    policy = example.Policy()
    reference = copy.deepcopy(policy)
    params = list(policy.parameters())
    optimizer = torch.optim.AdamW(params, 3e-3)

    def log_probabilities(model, tokens):
        scores = model(tokens[:, :-1]).log_softmax(-1)
        return scores.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)

    update = 0
    for prompts, uniform in zip(batches, uniforms, strict=True):
        with torch.no_grad():
            tokens = prompts.repeat_interleave(example.GROUP).unsqueeze(1)
            for place in range(example.LENGTH):
                scores = policy(tokens)[:, -1] - torch.log(-torch.log(uniform[place]))
                tokens = torch.cat([tokens, scores.argmax(-1, keepdim=True)], dim=1)
            old = log_probabilities(policy, tokens)
            first = log_probabilities(reference, tokens)
        reward = (tokens[:, 1:] % 2 == 0).float().mean(1).view(len(prompts), -1)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        advantage = advantage.view(-1, 1)
        for _ in range(2):
            new = log_probabilities(policy, tokens)
            ratio = torch.exp(new - old)
            gain = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage)
            divergence = torch.exp(first - new) - (first - new) - 1
            loss = (0.05 * 0.99**update * divergence - gain).mean()
            yield clipped(params, optimizer, loss), policy
            update += 1
