# Every target sets up what it needs: see scripts/setup.sh. `make train ARGS="--model 100m"` passes options on.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=
# Processes that share out the test files: ranks of one file wait for each other, and another file's run meanwhile.
WORKERS ?= 2

# The site is built from sources alone: its environment needs no PyTorch.
DOCS_VENV ?= .venv-docs

# Above $(VENV), with the newest transformers
VENV5  ?= .venv-transformers5

# The newest releases of everything, brought up to date at each use
NEWEST ?= .venv-newest

BIN   := $(VENV)/bin
READY := $(VENV)/.fp8booster-ready
READY5 := $(VENV5)/.fp8booster-ready
# What concerns transformers: models and what is fused of them; of each plugin, and of the command, that it shards,
# trains, communicates, recomputes and saves these models. The rest is the same with any version.
TESTS5 := tests/hf tests/examples/test_trainer.py tests/examples/test_plain.py tests/nn/test_distributed.py \
  tests/nn/graphs tests/nn/test_families.py tests/nn/test_modules.py tests/nn/linear/test_conv1d.py \
  $(addprefix tests/serving/test_,export.py handover.py gathering.py names.py compressed_tensors.py key_value_cache.py) \
  $(addprefix tests/nn/fused/test_,autocast.py causal_lm_loss.py decoder.py families.py fuse.py packing.py \
    recompute.py transformers.py) \
  tests/colossal/test_missing_imports.py tests/colossal/tensor/test_body.py \
  tests/plugins/test_low_level_zero_fused.py tests/plugins/test_sharding.py \
  $(addprefix tests/nn/experts/test_,fp8_experts.py batched.py parallel.py fp8_rows.py) tests/plugins/test_fp8_experts.py \
  tests/plugins/test_moe_families.py \
  tests/cli/train/test_model_folder.py \
  tests/training/test_arithmetic.py \
  $(addprefix tests/plugins/test_low_level_zero_checkpoints.py::test_, \
    checkpoints_cross keys_are_those_of_the_native_plugin transformers_loads_a_checkpoint_of_an_fp8_run) \
  $(addprefix tests/plugins/test_torch_ddp.py::test_ddp_, \
    runs_all_products_but_those_of_the_vocabulary_head_in_fp8 in_fp8_stays_near_native sends_gradients_in_fp8 \
    trains_adapters_on_a_frozen_base_in_fp8 checkpoints_cross) \
  $(addprefix tests/plugins/test_torch_fsdp_fused.py::test_fsdp_, \
    trains_a_fused_model_as_an_unfused_one recomputes_fused_layers_to_the_same_bits \
    trains_a_fused_model_whose_head_is_its_embedding runs_all_products_of_a_fused_model_in_fp8 \
    evaluates_a_fused_model_with_the_weights_it_gathered checkpoints_of_a_fused_model_cross) \
  $(addprefix tests/colossal/gemini/test_fused.py::test_, \
    all_products_run_in_fp8_and_merged_ones_once a_fused_model_learns_as_an_unfused_one \
    activations_that_are_computed_again_change_no_bit_of_a_fused_model \
    models_with_and_without_biases_learn_fused a_fused_model_evaluates_with_the_weights_that_it_trains \
    checkpoints_of_a_fused_model_cross) \
  $(addprefix tests/colossal/,hybrid/test_sharded_models.py hybrid/test_qwen3.py moe/test_split_experts.py \
    gemini/test_fused_tensor_parallel.py) \
  $(addprefix tests/colossal/hybrid/test_fused.py::test_, \
    gradients_and_losses_are_those_of_unfused_layers the_other_families_train_fused \
    checkpointed_fused_layers_give_the_same_bits a_checkpoint_has_the_names_and_values_of_an_unfused_one \
    experts_train_fused_where_they_lie_on_several_ranks) \
  tests/colossal/hybrid/test_loss.py::test_loss_and_gradients_are_those_of_whole_logits_in_fp32 \
  $(addprefix tests/plugins/test_moe_hybrid_parallel.py::test_moe_, \
    runs_all_products_but_those_of_head_and_routers_in_fp8 in_fp8_stays_near_native \
    routers_of_all_stages_learn_to_balance_their_experts checkpoints_cross) \
  $(patsubst %,'tests/colossal/test_compat.py::test_patch_is_missed_when_taken_out[%]', \
    llama_has_one_body mistral_has_one_body qwen2_has_one_body qwen3_has_a_policy mixtral_has_one_body \
    models_that_are_not_sharded_are_refused mixtral_policies_know_the_block mixtral_blocks_return_their_output \
    hybrid_parallel_plugin_splits_experts moe_hybrid_parallel_plugin_splits_experts mixtures_have_a_policy \
    moe_gathers_states_of_all_experts moe_divides_states_of_all_experts moe_writes_each_weight_once) \
  $(addprefix tests/cli/plan/test_dry_run.py::test_, experts_in_one_parameter_are_planned_in_grouped_products \
    peaks_are_those_of_a_rank_that_trains) \
  $(addprefix tests/cli/train/test_runs.py::test_, a_run_in_both_precisions_ends_with_a_table_and_keeps_its_files \
    a_resumed_run_equals_the_uninterrupted_one_bit_for_bit)
# What concerns PyTorch too, for releases of which no version is held
TESTS_NEWEST := tests/kernels tests/comm tests/optim tests/monitor tests/test_tensor.py tests/nn/test_compile.py \
  tests/cli/train/test_data.py $(TESTS5)
CODE  := fp8booster tests $(wildcard benchmarks examples scripts)

.PHONY: help setup train test test-transformers5 test-newest test-gpu lint format docs doctor clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 28

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" bash scripts/setup.sh
	@touch $@

setup: $(READY) ## make the virtual environment (PYTHON=, VENV=, TORCH= choose with what)

train: $(READY) ## train a small LLaMA in BF16 and in FP8 and compare
	$(BIN)/fp8booster train $(ARGS)

$(READY5): $(READY) constraints-transformers5.txt scripts/transformers5.sh
	VENV="$(VENV)" VENV5="$(VENV5)" bash scripts/transformers5.sh
	@touch $@

PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(READY) ## run the test suite on the CPU, then test-transformers5; with ARGS, what they name alone
	$(BIN)/python $(PYTEST) $(ARGS)
	$(if $(ARGS),,$(MAKE) test-transformers5)

test-transformers5: $(READY5) ## run the tests that concern transformers with its newest version
	$(VENV5)/bin/python $(PYTEST) $(or $(ARGS),$(TESTS5))

test-newest: ## run the tests that concern other packages with the newest of each, as once a week
	PYTHON="$(PYTHON)" VENV="$(NEWEST)" bash scripts/newest.sh
	$(NEWEST)/bin/python $(PYTEST) $(or $(ARGS),$(TESTS_NEWEST))

test-gpu: $(READY) ## run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(READY) ## check style, types, and that imports run downward without circles
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(READY) ## rewrite the code in the project's style
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

$(DOCS_VENV)/.ready: pyproject.toml
	"$(PYTHON)" -m venv "$(DOCS_VENV)"
	$(DOCS_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(DOCS_VENV)/bin/python -m pip install --quiet --group docs
	@touch $@

docs: $(DOCS_VENV)/.ready ## build the site into site/, strictly, with its links checked
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict $(ARGS)

doctor: $(READY) ## say what this machine can do and what is missing
	$(BIN)/fp8booster doctor $(ARGS)

clean: ## remove the virtual environments, caches and build output; runs/ stays
	rm -rf "$(VENV)" "$(VENV5)" "$(NEWEST)" "$(DOCS_VENV)" site build dist *.egg-info .pytest_cache .ruff_cache
	find fp8booster tests -name __pycache__ -type d -prune -exec rm -rf {} +
