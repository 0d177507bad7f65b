// The aten operators (without "aten::") whose NPU kernels need an aclnn operator that is not simulated.
// Used by boxed.cpp. When you add an OP line for one of them, delete it here.
#pragma once

namespace cannsim {

inline constexpr const char* kBoxedNames[] = {
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d",
    "_adaptive_avg_pool3d_backward", "_add_relu_", "_aminmax", "_cdist_backward", "_cdist_forward",
    "_conv_depthwise2d", "_ctc_loss", "_ctc_loss_backward", "_embedding_bag", "_embedding_bag_forward_only",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "_foreach_acos", "_foreach_acos_",
    "_foreach_asin", "_foreach_asin_", "_foreach_atan", "_foreach_atan_", "_foreach_ceil", "_foreach_ceil_",
    "_foreach_cosh", "_foreach_cosh_", "_foreach_floor", "_foreach_floor_", "_foreach_frac", "_foreach_frac_",
    "_foreach_round", "_foreach_round_", "_foreach_sinh", "_foreach_sinh_", "_foreach_trunc", "_foreach_trunc_",
    "_linalg_eigh", "_linalg_slogdet", "_pdist_forward", "_prelu_kernel", "_prelu_kernel_backward",
    "_scaled_mm", "_scaled_mm_v2", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl",
    "_transform_bias_rescale_qkv", "_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa_backward",
    "_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact1d_backward", "_upsample_nearest_exact2d", "_upsample_nearest_exact2d_backward",
    "_upsample_nearest_exact3d", "_upsample_nearest_exact3d_backward", "acosh", "acosh_", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "adaptive_avg_pool3d_backward", "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward", "adaptive_max_pool3d", "adaptive_max_pool3d_backward", "addr_",
    "affine_grid_generator", "aminmax", "angle", "asinh", "asinh_", "atanh", "atanh_",
    "attention_worker_scheduler_", "avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward",
    "batch_norm_backward_elemt", "batch_norm_backward_reduce", "batch_norm_elemt",
    "batch_norm_gather_stats_with_counts", "batch_norm_stats", "cdist", "celu", "celu_", "channel_shuffle",
    "col2im", "conv_tbc", "conv_tbc_backward", "cosh_", "embedding_renorm_",
    "fake_quantize_per_channel_affine_cachemask", "ffn_worker_scheduler_", "gcd", "grid_sampler_2d",
    "grid_sampler_2d_backward", "grid_sampler_3d", "grid_sampler_3d_backward", "gru", "hardshrink",
    "hardshrink_backward", "im2col", "kl_div_target_backward", "linalg_cross", "linalg_eigh",
    "linalg_householder_product", "linalg_lstsq", "logit", "logit_", "logit_backward", "lstm", "lstm_cell",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices",
    "max_pool3d_with_indices_backward", "max_unpool2d", "max_unpool3d", "multilabel_margin_loss",
    "multilabel_margin_loss_forward", "nanmedian", "nansum", "nll_loss2d_backward", "nll_loss2d_forward",
    "pdist", "polar", "quantize_per_channel", "quantize_per_tensor", "reflection_pad2d",
    "reflection_pad2d_backward", "reflection_pad3d", "reflection_pad3d_backward", "renorm", "renorm_",
    "replication_pad1d", "replication_pad1d_backward", "replication_pad2d", "replication_pad2d_backward",
    "replication_pad3d", "replication_pad3d_backward", "rrelu_with_noise", "rrelu_with_noise_", "sinc", "sinc_",
    "slogdet", "soft_margin_loss", "soft_margin_loss_backward", "softshrink", "softshrink_backward",
    "unique_dim", "upsample_bicubic2d", "upsample_bicubic2d_backward", "upsample_bilinear2d",
    "upsample_bilinear2d_backward", "upsample_linear1d", "upsample_linear1d_backward", "upsample_nearest1d",
    "upsample_nearest1d_backward", "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_nearest3d",
    "upsample_nearest3d_backward", "upsample_trilinear3d", "upsample_trilinear3d_backward", "xlogy_",
};

}  // namespace cannsim
