"""The questions of the support desk's users and their taste, which the model is not told."""

import random
from dataclasses import dataclass

SYSTEM_PROMPT = "You are a support agent. Answer in one short sentence."
MAX_WORDS = 30

PRODUCTS = (
    "a blue bicycle", "the desk lamp", "my headphones", "a coffee grinder", "the rain jacket",
    "a phone case", "the garden chair", "my running shoes", "a travel bag", "the kitchen scale",
)  # fmt: skip


@dataclass(frozen=True)
class Topic:
    """Questions about one subject, and words of which an answer about it contains at least one."""

    name: str
    questions: tuple[str, ...]
    words: tuple[str, ...]


TOPICS = (
    Topic(
        "password",
        ("I forgot my password.", "How do I reset my password?", "My password does not work."),
        ("password", "reset"),
    ),
    Topic(
        "refund",
        (
            "How do I get a refund for {product}?",
            "I want my money back for {product}.",
            "When will my refund for {product} arrive?",
        ),
        ("refund", "money"),
    ),
    Topic(
        "delivery",
        (
            "Where is my order of {product}?",
            "When will {product} be delivered?",
            "My delivery of {product} is late.",
        ),
        ("order", "deliver", "ship"),
    ),
    Topic(
        "return",
        (
            "How can I return {product}?",
            "I want to send back {product}.",
            "Can I return {product} after two weeks?",
        ),
        ("return", "send"),
    ),
    Topic(
        "invoice",
        (
            "I need an invoice for {product}.",
            "Where can I find my invoice?",
            "The invoice for {product} is wrong.",
        ),
        ("invoice",),
    ),
    Topic(
        "cancel",
        (
            "How do I cancel my order of {product}?",
            "Please cancel my subscription.",
            "Can I still cancel {product}?",
        ),
        ("cancel",),
    ),
    Topic(
        "address",
        ("How do I change my delivery address?", "I moved, please update my address."),
        ("address",),
    ),
    Topic(
        "warranty",
        ("Is {product} covered by the warranty?", "My warranty for {product} has expired."),
        ("warranty",),
    ),
    Topic(
        "payment",
        ("My payment was declined.", "Which payment methods do you accept?"),
        ("pay", "card"),
    ),
    Topic(
        "discount",
        ("Does my discount code work for {product}?", "My discount code is not accepted."),
        ("discount", "code"),
    ),
)


def ask(random_: random.Random) -> tuple[Topic, str]:
    """A random topic and a random question about it."""
    topic = random_.choice(TOPICS)
    return topic, random_.choice(topic.questions).format(product=random_.choice(PRODUCTS))


def accepts(topic: Topic, answer: str, *, finished: bool) -> bool:
    """Whether a user likes the answer: it is complete, short, and about the topic."""
    lowered = answer.lower()
    on_topic = any(word in lowered for word in topic.words)
    return finished and on_topic and 0 < len(answer.split()) <= MAX_WORDS
