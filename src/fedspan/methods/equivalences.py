"""Which method turns into which at the edge of its parameters, and the test that shows it."""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One equality: which methods it speaks of, in words, and `file::test` of the test suite."""

    methods: tuple[str, ...]
    words: str
    test: str
    condition: str = ""
    """What must hold besides."""


LINES: tuple[Line, ...] = (
    Line(("fedprox",), "FedProx(mu = 0) = FedAvg", "test_limits::test_fedprox_without_its_term_is_fedavg"),
    Line(
        ("fedavg-ft", "fedavg-head"),
        "FedAvg + fine-tuning(no epochs) = FedAvg + head(no epochs) = FedAvg",
        "test_limits::test_fedavg_that_is_not_fitted_is_fedavg_bit_for_bit",
    ),
    Line(
        ("fedavg-ft",),
        "FedAvg + fine-tuning(the run's epochs): predictor = FedAvg trained once more",
        "test_limits::test_fine_tuning_is_one_more_local_round",
        condition="on the same minibatches",
    ),
    Line(
        ("fedavg-head", "fedavg-ft"),
        "FedAvg + head(all layers are the head) = FedAvg + fine-tuning",
        "test_limits::test_a_head_that_is_all_of_the_model_is_fine_tuning",
    ),
    Line(("fedper",), "FedPer(no private head) = FedAvg", "test_limits::test_fedper_without_a_head_is_fedavg"),
    Line(
        ("fedper",),
        "FedPer(all layers personal) = Local",
        "test_limits::test_fedper_with_all_layers_personal_is_local",
    ),
    Line(
        ("lg-fedavg", "fedper"),
        "LG-FedAvg(X shared) = FedPer(X shared)",
        "test_limits::test_lg_fedavg_and_fedper_with_the_same_layers_are_one_method",
    ),
    Line(
        ("fedsim",),
        "FedSim(server step 1) = FedPer",
        "test_baselines::test_fedsim_with_a_plain_server_is_fedper",
        condition="up to rounding: u − (u − mean) is the mean",
    ),
    Line(("fedalt",), "FedAlt(head personal) = FedRep", "test_baselines::test_fedalt_is_fedrep_with_the_same_epochs"),
    Line(
        ("fedrep", "fedbabu"),
        "FedRep(no head epochs) = FedBABU(no tuning)",
        "test_limits::test_fedrep_without_head_epochs_is_fedbabu_without_tuning",
    ),
    Line(("apfl",), "APFL(alpha = 1): predictor = Local", "test_baselines::test_apfl_all_local_is_local"),
    Line(
        ("apfl",),
        "APFL(alpha = 0): predictor = FedAvg",
        "test_baselines::test_apfl_all_global_is_fedavg_and_leaves_v_alone",
        condition="not adaptive",
    ),
    Line(("ditto",), "Ditto(lam = 0) = Local", "test_limits::test_ditto_without_its_term_is_local_at_every_round"),
    Line(
        ("cfl",),
        "CFL(eps_2 = inf) = FedAvg(uniform)",
        "test_baselines::test_cfl_that_never_splits_is_fedavg_with_uniform_weights",
    ),
    Line(("fedala",), "FedALA(A = 1) = FedAvg", "test_baselines::test_fedala_with_frozen_weights_is_fedavg_or_local"),
    Line(
        ("fedfomo",),
        "FedFOMO(M = 0) = Local on what is not held out",
        "test_baselines::test_fedfomo_without_models_is_local_on_what_is_not_held_out",
        condition="FedFOMO holds out a part for its losses: Local must not see it either",
    ),
    Line(
        ("fedproto", "fedtgp"),
        "FedProto(lam = 0) = FedTGP(lam = 0) = Local",
        "test_prototypes::test_without_their_term_they_are_local",
    ),
    Line(("pfedsim",), "pFedSim(rho = 1) = FedAvg", "test_baselines::test_pfedsim_in_its_warm_up_is_fedavg"),
    Line(
        ("per-fedavg",),
        "Per-FedAvg(alpha = 0) = FedAvg(uniform)",
        "test_baselines::test_per_fedavg_without_inner_step_is_fedavg",
        condition="on the minibatches D'; D and D'' then play no part",
    ),
    Line(
        ("pfedpara", "fedlmt"),
        "pFedPara(W2 = 0 frozen) = FedLMT",
        "test_equivalences::test_pfedpara_without_its_second_matrix_is_fedlmt",
        condition="linear layers, one start, decay of U and V; convolutions differ",
    ),
    Line(
        ("fedloru", "fedlora"),
        "FedLoRU(tau = inf) = FedLoRA",
        "test_fedloru::test_without_accumulation_it_is_fedlora",
    ),
    Line(
        ("fedloru",),
        "FedLoRU(A = I frozen) = FedAvg(eta alpha^2)",
        "test_fedloru::test_with_a_frozen_identity_it_is_fedavg",
        condition="rank as large as the smaller side; momentum and decay only where no bias is trained beside it or"
        " alpha = 1",
    ),
    Line(
        ("pfedloru",),
        "pFedLoRU(no personal epochs, LU = 0) = FedLoRU",
        "test_fedloru::test_pfedloru_without_personal_epochs_is_fedloru",
    ),
    Line(
        ("mfedloru",),
        "mFedLoRU(identity nesting) = FedLoRU",
        "test_fedloru::test_mfedloru_with_inner_identities_is_fedloru",
    ),
    Line(
        ("pfedlora1", "pfedlora2"),
        "pFedLoRA(LU = 0 frozen) = FedAvg",
        "test_fedloru::test_pfedlora_without_its_pair_is_fedavg",
    ),
    Line(
        ("factorized-fl-alpha", "factorized-local"),
        "Factorized-FL alpha(tau > 1, m_min = 1) = factorised Local",
        "test_factorized_fl::test_a_client_that_matches_nobody_is_alone_bit_for_bit",
    ),
    Line(
        ("factorized-fl-beta", "factorized-fedavg"),
        "Factorized-FL beta(eps = 0, all matched, equal n) = Factorized-FedAvg",
        "test_factorized_fl::test_beta_with_all_matched_is_factorized_fedavg",
        condition="all clients in every round: matching averages the last uploads of all",
    ),
    Line(
        ("fedara",),
        "FedARA(nothing decomposed, lam = rho = 0) = FedPer",
        "test_fedara::test_without_decomposition_and_anchors_it_is_fedper",
    ),
    Line(
        ("fedara",),
        "FedARA(lam = 0, head shared, uniform) = FedHM",
        "test_fedara::test_with_shared_heads_and_without_anchors_it_is_fedhm",
        condition="the same ranks and decay",
    ),
    Line(
        ("fedara-star", "fedara"),
        "FedARA* = FedARA(ratio = 1/2)",
        "test_equivalences::test_fedara_star_is_fedara_at_half_the_rank",
    ),
    Line(
        ("pfedes",),
        "pFedES(mu = 0) = Local",
        "test_equivalences::test_models_that_do_not_look_at_the_common_part_are_local",
    ),
    Line(
        ("pfedafm",),
        "pFedAFM(lr_alpha = 0) = Local",
        "test_equivalences::test_models_that_do_not_look_at_the_common_part_are_local",
        condition="α starts at 1",
    ),
    Line(
        ("fedas",),
        "FedAS(no alignment, equal traces) = FedPer(uniform)",
        "test_feature_methods::test_fedas_without_alignment_and_with_equal_traces_is_fedper",
    ),
    Line(
        ("fedkd",),
        "FedKD(all energy, no teaching): mentee = FedAvg(uniform)",
        "test_feature_methods::test_fedkd_without_teaching_is_fedavg_beside_local",
        condition="gradients below the clip",
    ),
    Line(
        ("pfl-mf-paper",),
        "pFL-MF(r = 1, v = 1, K = 0) = FedSGD",
        "test_limits::test_pfl_mf_of_rank_one_with_frozen_v_is_fedsgd",
    ),
    Line(
        ("pfl-mf-paper",),
        "pFL-MF(one common v, K = 0) = FedSGD from U v",
        "test_pfl_mf::test_from_one_v_algorithm_1_is_one_model_for_all_until_a_v_has_moved",
    ),
    Line(
        ("pfl-mf-paper",),
        "pFL-MF(one step on U) = its literal form",
        "test_equivalences::test_one_literal_step_on_u_is_the_gradient_step",
        condition="one full-batch step; with more steps the literal form is K steps on U with v fixed, not K on theta",
    ),
    Line(
        (),
        "simulator = one client after another, for every method",
        "test_all_methods::test_every_method_keeps_its_promises",
    ),
    Line(
        ("ifca",),
        "IFCA(k = 1) = FedAvg(uniform)",
        "test_clusters::test_ifca_with_one_cluster_is_fedavg_with_uniform_weights",
    ),
    Line(
        ("ifca",),
        "IFCA(models of the groups) = Oracle",
        "test_clusters::test_ifca_at_the_models_of_the_groups_is_the_oracle",
        condition="as long as every client's own group fits it best",
    ),
    Line(
        ("fedcollab",),
        "FedCollab(one coalition, no private head) = FedAvg",
        "test_clusters::test_fedcollab_with_one_coalition_is_fedavg_once_it_is_settled",
        condition="from the round after the distances are known; minibatches are those of that round",
    ),
    Line(
        ("lr-bpfl",),
        "LR-BPFL(masks of one, frozen, no draws) = FedAvg",
        "test_posteriors::test_lr_bpfl_with_frozen_masks_of_one_is_fedavg",
    ),
    Line(
        ("waffle",),
        "WAFFLe(all factors used) = FedAvg of the factorised network",
        "test_posteriors::test_waffle_with_all_factors_in_use_is_fedavg_of_the_factorised_network",
    ),
    Line(("oracle",), "Oracle(one group) = FedAvg", "test_limits::test_oracle_with_one_group_is_fedavg"),
    Line(
        ("pfedme",),
        "pFedMe(one inner step of 1/lam) = FedAvg",
        "test_baselines::test_pfedme_with_one_inner_step_is_fedavg",
    ),
    Line(
        ("l2gd",),
        "L2GD(p = 0) = Local",
        "test_baselines::test_l2gd_without_mean_steps_is_local_and_without_local_steps_never_trains",
    ),
    Line(("fedhm",), "FedHM(full models) = FedAvg", "test_fedhm::test_with_full_models_it_is_fedavg"),
    Line(
        ("feddlr",),
        "FedDLR(all energy) = FedAvg",
        "test_fedhm::test_feddlr_with_all_energy_is_fedavg_and_with_less_cuts_both_ways",
    ),
    Line(
        (),
        "any server optimiser(sgd, step 1, no momentum) = the mean",
        "test_server_optimizer::test_a_step_of_one_without_momentum_is_the_mean",
    ),
    Line(("local", "fedavg"), "FedAvg(one client) = Local", "test_limits::test_fedavg_with_one_client_is_local"),
    Line(
        ("fedavg",),
        "FedAvg(full batches, all clients) = gradient descent on the pooled loss",
        "test_limits::test_fedavg_with_full_batches_is_gradient_descent_on_the_pooled_loss",
    ),
    Line(
        ("flute",),
        "FLUTE(no terms) = FedRep's head phase, then FedPer",
        "test_feature_methods::test_flute_without_its_terms_is_fedreps_head_phase_and_then_fedper",
    ),
    Line(
        ("pfedfda",),
        "pFedFDA(beta = 0 or 1) = the common or the own discriminant",
        "test_feature_methods::test_pfedfda_between_the_common_and_the_own_discriminant",
    ),
    Line(
        ("fedpara",),
        "FedPara(second matrix of ones) = FedAvg of low rank",
        "test_fedpara::test_with_a_constant_second_matrix_it_is_plain_low_rank_fedavg",
    ),
    Line(
        ("fedlmt",),
        "FedLMT = FedAvg of the factorised network",
        "test_fedhm::test_fedlmt_is_fedavg_of_the_factorised_network",
    ),
    Line(
        ("pfl-mf",),
        "pFL-MF(scaled step, r = 1, v = 1) = FedAvg",
        "test_limits::test_the_scaled_step_of_rank_one_is_fedavg",
    ),
    Line(
        ("pfl-mf",),
        "pFL-MF(scaled step, one-hot v) = FedAvg inside clusters",
        "test_limits::test_the_scaled_step_with_one_hot_v_is_fedavg_inside_clusters",
    ),
    Line(
        ("pfl-mf-adaptive",),
        "adaptive pFL-MF(kappa = tau = 0) = FedAvg",
        "test_pfl_mf_adaptive::test_without_directions_and_residual_it_is_fedavg_with_clipping",
        condition="with the same `clip_norm`",
    ),
    Line(
        ("pfl-mf-adaptive",),
        "adaptive pFL-MF(tau = 0): heads in the mean + r directions",
        "test_pfl_mf_adaptive::test_without_a_residual_models_lie_in_the_span_of_the_directions",
    ),
    Line(
        ("pfl-mf-adaptive",),
        "adaptive pFL-MF(kappa = 0, tau = inf): heads = free fits on the common body",
        "test_pfl_mf_adaptive::test_a_wide_residual_is_a_free_fit_and_so_are_all_directions",
        condition="in the limit, to 1e-7 at tau = 1e9, where fits are run to their end; so is r = d, kappa = inf",
    ),
    Line(
        ("pfl-mf-adaptive",),
        "adaptive pFL-MF(0 < tau, kappa): heads = the minimisers under the prior",
        "test_pfl_mf_adaptive::test_heads_are_the_most_probable_ones",
        condition="to 1e-10 of the normal equations where fits are run to their end",
    ),
    Line(
        ("pfl-mf-adaptive",),
        "adaptive pFL-MF(no memory, everybody there, rank <= r): its covariance = that of the heads",
        "test_pfl_mf_adaptive::test_the_covariance_of_all_heads_is_exact_up_to_rank_r",
    ),
    Line(
        ("pfl-mf-adaptive",),
        "adaptive pFL-MF(e sent alone) = adaptive pFL-MF(sums sent)",
        "test_pfl_mf_adaptive::test_both_wires_carry_the_same",
    ),
    Line(
        ("pfl-mf-joint",),
        "pFL-MF joint = FedPer on U and v",
        "test_pfl_mf::test_the_joint_form_is_fedper_on_u_and_v_as_the_public_code_runs_it",
    ),
    Line(
        ("pfl-mf-joint",),
        "pFL-MF joint(server optimiser of step 1) = the mean",
        "test_server_optimizer::test_a_step_of_one_without_momentum_is_the_mean",
    ),
    Line(
        ("prism",),
        "PriSM(all triples, one client) = steps on U and V",
        "test_clusters::test_prism_with_all_triples_steps_on_both_factors",
    ),
    Line(
        ("amht-lrs",),
        "AMHT-LRS(squared error) = least squares for w and U",
        "test_posteriors::test_amht_lrs_solves_least_squares_for_w_and_u",
    ),
)


def of(method: str) -> list[Line]:
    """The lines that speak of a method."""
    return [line for line in LINES if method in line.methods]
