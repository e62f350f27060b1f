# Two commands for a fresh machine: `make demo` and `make test`. Both make their own environment.
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Python compiles a module when it is first imported; most modules of dependencies never are.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
EXTRAS := onnxruntime,openvino,farm,test
# Requirements of pyproject.toml, as words.
required = $(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))$(1))'
# Further extras are installed by the package's name, which pip finds installed: -e would build it again.
PACKAGE := korch-compiler
STAMP := $(VENV)/.installed
# What pip installs as PyTorch. The default on Linux brings CUDA; a wheel of the CPU build can be given instead.
TORCH ?= torch
TORCH_STAMP := $(VENV)/.installed-torch

TRITON_STAMP := $(VENV)/.installed-triton

# Without compiled modules on the disk, each process of a test would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs web wheel test-web demo test tests test-torch test-cuda test-torch-cuda check bench size clean conformance bench-smoke fuzz
.DELETE_ON_ERROR:

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

# What builds the package is a dependency of its tests, too: it is unpacked once.
$(STAMP): pyproject.toml | $(VENV)/pyvenv.cfg
	$(INSTALL) $$($(call required,["build-system"]["requires"]))
	$(INSTALL) --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

build/candy.onnx: $(STAMP) benchmarks/models/candy.py benchmarks/models/writer.py
	@mkdir -p build
	@$(BIN)/python -m benchmarks.models candy $@

# Optimize a real model, check it, compare it, explain it.
demo: build/candy.onnx
	@printf '\n== The model, optimized for this machine and checked (build/candy.korch)\n\n'
	@$(BIN)/korch optimize build/candy.onnx -o build/candy.korch --budget 100
	@printf '\n== Against other engines, in one interleaved run\n\n'
	@$(BIN)/korch bench build/candy.korch --against onnxruntime,openvino
	@printf '\n== Why it is as fast as it is\n\n'
	@$(BIN)/korch explain build/candy.korch
	@if command -v npm >/dev/null 2>&1; then $(MAKE) --no-print-directory web \
	  && printf '\n== As a page\n\n' && $(BIN)/korch explain build/candy.korch --html build/candy.html; fi

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check tests

tests: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/pytorch --ignore tests/cuda --ignore tests/gpu --ignore tests/web

# PyTorch and Triton alone, which take as long as all the rest: .ci/run unpacks them at the same time.
build/torch: pyproject.toml | $(VENV)/pyvenv.cfg
	$(INSTALL) --no-deps --prefix $(CURDIR)/$@ '$(TORCH)' $$($(call required,["project"]["optional-dependencies"]["test-cuda"]))
	@touch $@

# PyTorch first and alone: whichever build it is, it is kept.
$(TORCH_STAMP): $(STAMP)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) '$(TORCH)' '$(PACKAGE)[torch,test-torch]'
	@touch $@

# Modules of PyTorch through korch.optimize and torch.compile.
test-torch: $(TORCH_STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/pytorch

$(TRITON_STAMP): $(STAMP)
	$(INSTALL) '$(PACKAGE)[test-cuda]'
	@touch $@

# Kernels for CUDA devices, without one: interpreted, and cross-compiled for sm_90 and sm_80.
# `make test-cuda KORCH_LONG=1` compiles the kernels of all five models of the paper, not of three.
test-cuda: $(TRITON_STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/cuda

# Both in one session: no core waits for the end of the first.
test-torch-cuda: $(TORCH_STAMP) $(TRITON_STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/pytorch tests/cuda

# Bundle the libraries that draw the page of `korch explain --html`; needs Node.js. Wheels have the bundle.
WEB := src/korch/report/web
web: $(WEB)/libraries.js

$(WEB)/libraries.js: web/libraries.js web/package.json web/package-lock.json
	cd web && npm ci --no-fund --no-audit --silent && npm run --silent build
	cd web/node_modules && for name in chart.js @kurkle/color cytoscape cytoscape-dagre @dagrejs/dagre @dagrejs/graphlib highlight.js; \
	  do printf '== %s\n\n' $$name; cat $$name/LICENSE*; printf '\n\n'; done > ../../$(WEB)/LICENSES.txt

# What users install: dist/korch_compiler-*.whl.
wheel: web
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

WEB_STAMP := $(VENV)/.installed-web

$(WEB_STAMP): $(STAMP)
	$(INSTALL) '$(PACKAGE)[test-web]'
	@touch $@

# The page in headless Chromium, which must be installed.
test-web: $(WEB_STAMP) web
	$(BIN)/python -m pytest tests/web

# The models against the other engines.
bench: $(TORCH_STAMP)
	$(INSTALL) '$(TORCH)' -e '.[iree,bench]'
	$(BIN)/python -m benchmarks.suite --output benchmarks/results/suite.json \
	  --plot benchmarks/results/suite.svg

# ONNX's own backend tests, with Korch and with ONNX Runtime alone: 2,024 cases.
conformance: $(STAMP)
	$(BIN)/python -m tests.support.conformance

# Random kernels of every element type; hostile models, artifacts and caches.
fuzz: $(STAMP)
	$(BIN)/python -m tests.support.fuzz_kernels --rounds 200
	$(BIN)/python -m tests.support.fuzz --cases 5000
	$(BIN)/python -m tests.support.fuzz --graphs 2000
	$(BIN)/python -m tests.support.fuzz --modules 300
	$(BIN)/python -m tests.support.fuzz --ranges 200

# Each benchmark model: optimized, and compared with ONNX Runtime.
bench-smoke: $(STAMP)
	$(BIN)/python -m benchmarks.suite --against onnxruntime --budget 60 --rounds 1

DOCS_STAMP := $(VENV)/.installed-docs

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) '$(PACKAGE)[docs]'
	@touch $@

# The documentation as a site in build/site, which asks no other host for anything. Warnings are errors,
# but not with --quiet, under which MkDocs does not count them. `make test` checks links, options and references.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@! grep -rEn '<(script|link|img|iframe)[^>]* (src|href)="(https?:)?//' build/site --include='*.html'
	@! grep -rEno '(url\(|@import )"?(https?:)?//[^)]*' build/site --include='*.css'
	@printf 'build/site/index.html\n'

# Lines per folder.
size:
	@for d in src/korch/*/; do printf '%6d %s\n' $$(cat $$(find $$d -name '*.py') | wc -l) $$d; done

clean:
	rm -rf build .venv
