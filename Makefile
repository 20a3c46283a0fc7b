# Two commands do all the set-up on a machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PACKAGE := .venv/.package
STAMP := .venv/.installed
# two test workers, one thread each: more only makes small matrices wait for each other
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

.PHONY: demo test lint types unit slow browser claims ledger bench docs pictures lowest dist clean

demo: $(PACKAGE)
	@# exit code 1 is the demonstration's point: an unhealthy network was found
	@$(BIN)/sounding check --html sounding-report.html || [ $$? -eq 1 ]

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(PYTEST)

# tests of minutes stand beside tests of seconds: a worker that is done takes from the other
slow: $(STAMP)
	$(PYTEST) --dist worksteal -m "(slow or data) and not gpu and not browser"

browser: $(STAMP)
	$(PYTEST) -m browser -rs

# every row of the ledger at quick scale, two at a time; the slow tests compare them with the committed verdicts
claims: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/sounding reproduce --all --scale quick --jobs 2 --out sounding-claims

# the ledger in docs/ and the verdicts in the package, from the committed results
ledger: $(STAMP)
	$(BIN)/sounding claims table --results docs/claims --markdown docs/ledger.md --html docs/ledger.html --index src/sounding/claims/ledger.json --pages

bench: $(STAMP)
	for script in bench/*.py; do $(BIN)/python $$script || exit 1; done

pictures: $(STAMP)
	$(BIN)/python docs/make_pictures.py
	$(BIN)/python docs/make_kind_pictures.py

docs: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx -W -q docs docs/_build
	$(BIN)/sounding audit --zoo hf --pages --out docs/zoo --quiet
	rm -rf docs/_build/zoo
	cp -r docs/zoo/pages docs/_build/zoo

# the default tests with the lowest versions of everything that the package needs, and without any extra
lowest:
	rm -rf .venv-lowest
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/pip install --quiet --disable-pip-version-check --constraint constraints-lowest.txt --editable . pytest pytest-xdist pytest-timeout hypothesis
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -n 2 --ignore=src/sounding/train/callbacks

# wheel and source distribution, and a look whether the wheel holds what the package needs
dist: $(STAMP)
	rm -rf dist
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt build
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m pytest -m slow tests/test_distribution.py

# the package alone: what a demonstration needs
$(PACKAGE): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sounding needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

# the tools of tests and gates
$(STAMP): $(PACKAGE)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis docs/_build
