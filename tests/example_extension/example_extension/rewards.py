"""A reward function. Its parameters after `answer` are those of the signal."""


def few_words(prompt: str, expected: str, answer: str, max_words: int = 3) -> float:
    return float(len(answer.split()) <= max_words)
