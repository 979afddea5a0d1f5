.PHONY: check setup test docs format

check: ## what CI runs
	./.ci/run

setup: ## .venv with everything in it
	./launch/setup.sh

test: ## the whole test suite
	./launch/test.sh

docs: setup ## the site, in build/site
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

format: setup ## rewrite the sources in the style that check asks for
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	find csrc -type f \( -name '*.h' -o -name '*.inc' -o -name '*.cpp' -o -name '*.cu' \) -exec .venv/bin/clang-format -i {} +
