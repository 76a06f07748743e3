"""Says at the end of `make test-docs` how many code blocks ran, and which did not and why."""

from pages import ALL, commands


def pytest_terminal_summary(terminalreporter):
    left = [block for block in ALL if block.reason]
    python = sum(block.language == "python" and not block.reason for block in ALL)
    shell = sum(len(commands(block)) for block in ALL if block.language == "sh" and not block.reason)
    terminalreporter.section("code blocks of the documentation")
    terminalreporter.write_line(f"{python} of Python and {shell} shell commands run, {len(left)} blocks are not run:")
    for block in left:
        terminalreporter.write_line(f"  {block.place:<28} {block.reason}")
