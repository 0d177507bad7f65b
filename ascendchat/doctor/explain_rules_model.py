"""`ascendchat explain LOG`: rules about shapes, token ranges, numbers and the tokenizer."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, NOTE, SYMPTOM, Rule, Text

RULES = [
    Rule(
        id="token-range",
        level=CAUSE,
        patterns=[
            r"index out of range in self",
            r"IndexError: Target -?\d+ is out of bounds",
            r"[Tt]oken id.{0,40}(?:out of range|outside)",
            r"index \d+ is out of bounds for dimension \d+ with size \d+",
        ],
        en=Text(
            title="A token id or index is outside the table",
            cause=(
                "An embedding or target index is larger than the table has rows: the tokenizer and the model do "
                "not belong together, or the data was prepared with another tokenizer."
            ),
            check=[
                "Is the vocabulary size of the tokenizer not larger than that of the model?",
                "Was the data prepared with this tokenizer?",
            ],
            symptoms=["index out of range", "token id too large", "vocabulary size does not match"],
        ),
        zh=Text(
            title="token id 或索引超出范围",
            cause="嵌入或标签的索引超过了表的行数：分词器与模型不配套，或者数据是用另一个分词器处理的。",
            check=[
                "分词器的词表大小是否不超过模型的词表大小？",
                "数据是否用当前分词器处理？",
            ],
            symptoms=["索引越界", "词表大小不匹配", "token 越界"],
        ),
        commands=[
            "ascendchat data verify",
        ],
    ),
    Rule(
        id="shape",
        level=CAUSE,
        patterns=[
            r"mat1 and mat2 shapes cannot be multiplied",
            r"The size of tensor a \(\d+\) must match the size of tensor b",
            r"size mismatch for (?P<name>[\w.]+)",
            r"Error\(s\) in loading state_dict",
            r"shape '\[[^\]]*\]' is invalid for input of size",
            r"stack expects each tensor to be equal size",
        ],
        en=Text(
            title="Shapes do not match",
            cause=(
                "Weights of one size were loaded into a model of another (depth, width, vocabulary), or a batch "
                "holds rows of different length."
            ),
            check=[
                "Is the checkpoint of the same --depth and tokenizer? The saved config lies in the run folder.",
                "The message gives both shapes: which of them is the one you expect?",
            ],
            symptoms=["shapes do not match", "cannot load the checkpoint", "size mismatch"],
        ),
        zh=Text(
            title="张量形状不匹配",
            cause="把一种大小的权重加载到了另一种大小的模型（层数、宽度、词表），或一个批次中有长度不同的行。",
            check=[
                "检查点的 --depth 和分词器是否相同？保存的配置在运行目录里。",
                "报错给出了两个形状：哪一个是你预期的？",
            ],
            symptoms=["形状不匹配", "加载不了权重", "加载不了检查点"],
        ),
        commands=[
            "ls $ASCENDCHAT_HOME/runs 2>/dev/null || ls ~/.cache/ascendchat/runs",
        ],
    ),
    Rule(
        id="attention-mask",
        level=CAUSE,
        patterns=[
            r"atten_?[Mm]ask.{0,160}(?:should be|must be|is None|invalid|not support|error)",
            r"sparse_?[Mm]ode.{0,120}(?:invalid|not support|must be|should be|is ignored)",
            r"attention.{0,60}(?:parity (?:check )?(?:failed|broken)|is not causal|differs from the reference)",
        ],
        en=Text(
            title="The attention mask and its mode do not agree",
            cause=(
                "npu_fusion_attention: True means masked OUT (the opposite of torch); without a mask sparse_mode "
                "is ignored and attention is full, not causal; modes 2, 3, 4 need the fixed 2048x2048 "
                "upper-triangle mask; scale must be given (its default is 1.0). The transformers path ignores "
                "window_size."
            ),
            check=[
                "Compare one batch with plain attention on the CPU.",
                "Is the kernel named at the start of the run the one you expect?",
            ],
            symptoms=["attention wrong", "attention mask wrong"],
        ),
        zh=Text(
            title="注意力掩码与其模式不一致",
            cause=(
                "npu_fusion_attention 中 True 表示屏蔽（与 torch 相反）；不给掩码时 sparse_mode 被忽略，注意力是全"
                "量而非因果；模式 2、3、4 需要固定的 2048x2048 上三角掩码；必须给出 scale（默认 1.0）。"
                "transformers 的路径会忽略 window_size。"
            ),
            check=[
                "取一个批次，与 CPU 上的普通注意力比较结果。",
                "启动时打印的注意力实现是否是你想要的？",
            ],
            symptoms=["注意力不对", "掩码不对"],
        ),
        commands=[
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="nan-loss",
        level=SYMPTOM,
        patterns=[
            # loss stands in brackets so that the scan looks for the rare word, not for the one on every line
            r"""(?<!best )(?<!min )(?<!lowest )(?:\bloss)["']?\s*[:= ]\s*["']?nan\b""",
            r"""(?<!best )(?<!min )(?<!lowest )(?:\bloss)["']?\s*[:= ]\s*["']?NaN\b""",
            r"""(?<!best )(?<!min )(?<!lowest )(?:\bloss)["']?\s*[:= ]\s*["']?-?inf\b""",
            r"""(?<!best )(?<!min )(?<!lowest )(?:\bloss)["']?\s*[:= ]\s*["']?-?Infinity\b""",
            r"(?:oss(?! of step \d)|rad\w*).{0,30}(?:is|was|became|contains) (?:a )?NaN\b",
            r"(?:oss(?! of step \d)|rad\w*).{0,30}(?:is|was|became|contains) (?:a )?nan\b",
            r"(?:oss|rad\w*).{0,40}non-finite",
            r"(?:oss|rad\w*).{0,40}not finite",
            r"Function '\w+' returned nan values",
            r"probability tensor contains either `inf`, `nan`",
        ],
        en=Text(
            title="The loss (or gradient) became NaN or infinite",
            cause=(
                "Usual reasons: learning rate too high for the batch, fp16 without working loss scaling, a row in "
                "which every target is masked, a corrupt batch; on the NPU also an attention mask of the wrong "
                "polarity or a missing softmax scale."
            ),
            check=[
                "At which step did it start, and did the gradient norm rise before it?",
                (
                    "Does the same step on the CPU in fp32 give a finite loss? Then it is precision; if not, it is "
                    "the data or the learning rate."
                ),
                "Is every row left with at least one target?",
            ],
            symptoms=["loss nan", "loss is nan", "loss inf", "gradient nan"],
        ),
        zh=Text(
            title="loss（或梯度）变成 NaN 或无穷大",
            cause=(
                "常见原因：学习率相对批量过大；fp16 没有有效的损失缩放；某行的标签全被屏蔽；数据损坏；在 NPU 上还可"
                "能是注意力掩码极性反了或缺少 softmax 缩放。"
            ),
            check=[
                "从哪一步开始？之前梯度范数是否上升？",
                "同一步在 CPU 上用 fp32 跑，loss 是否正常？正常则是精度问题；不正常则是数据或学习率问题。",
                "每一行是否至少有一个有效标签？",
            ],
            symptoms=["loss nan", "loss 变成 nan", "loss 为 nan", "loss 是 nan", "出现 nan"],
        ),
        commands=[
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="logprob-drift",
        level=NOTE,
        patterns=[
            r"(?:rollout|inference|vllm|vLLM).{0,80}log_?prob\w*.{0,60}(?:differ|drifted|disagree|do not match)",
            r"log_?prob\w* (?:drift|mismatch|gap).{0,60}(?:above|exceed|too|larger|>)",
            r"mismatch[_ ]kl.{0,40}(?:above|exceed|too large|larger than|over the limit)",
        ],
        en=Text(
            title="RL: rollout and training disagree about log-probabilities",
            cause=(
                "The two sides use other attention kernels, weight formats (NZ), precisions or orders of "
                "summation; or the weights were not synchronised. fp16 makes it worse."
            ),
            check=[
                (
                    "Is the gap there before the first update? Then it is numerics; if it grows only after "
                    "updates, it is the weight synchronisation."
                ),
                "Same dtype, same kernels, deterministic order on both sides.",
            ],
            symptoms=["rollout and training disagree"],
        ),
        zh=Text(
            title="RL：采样与训练的对数概率不一致",
            cause="两侧使用了不同的注意力算子、权重格式（NZ）、精度或求和顺序；或权重没有同步。fp16 会更严重。",
            check=[
                "第一次更新之前就有差距吗？若有则是数值问题；若更新之后才增大，则是权重同步问题。",
                "两侧使用相同的数据类型、相同的算子和确定的求和顺序。",
            ],
            symptoms=["采样和训练不一致"],
        ),
        commands=[
            (
                "export HCCL_DETERMINISTIC=true CLOSE_MATMUL_K_SHIFT=1 ATB_MATMUL_SHUFFLE_K_ENABLE=0 "
                "VLLM_ASCEND_ENABLE_NZ=0"
            ),
        ],
    ),
    Rule(
        id="initial-lr",
        level=CAUSE,
        patterns=[
            r"""KeyError: ["']initial_lr["']""",
            r"param 'initial_lr' is not specified in param_groups",
        ],
        en=Text(
            title="The optimizer state has no initial_lr",
            cause=(
                "The run was resumed with a scheduler that expects `initial_lr` in every parameter group, but the "
                "optimizer (new, or loaded from a checkpoint) does not hold it."
            ),
            check=[
                'Set group["initial_lr"] = group["lr"] for every group after building or loading the optimizer.',
                (
                    "ascendchat computes the rate from the step and does not need it: resume with `ascendchat "
                    "base` instead of an older script."
                ),
            ],
        ),
        zh=Text(
            title="优化器状态里没有 initial_lr",
            cause="恢复训练时，学习率调度要求每个参数组都有 `initial_lr`，但优化器（新建的或从检查点加载的）没有。",
            check=[
                '建立或加载优化器之后，对每个参数组设置 group["initial_lr"] = group["lr"]。',
                "ascendchat 由步数计算学习率，不需要它：请用 `ascendchat base` 恢复，而不是旧脚本。",
            ],
        ),
        commands=[
            "ascendchat base --help",
        ],
    ),
    Rule(
        id="lerp-dtype",
        level=CAUSE,
        patterns=[
            r"expected dtype \w+ for `(?:end|weight)` but got dtype \w+",
            r"lerp.{0,80}dtype",
            r"expected (?:scalar type|m1 and m2 to have the same dtype|mat1 and mat2 to have the same dtype)",
            r"Input type \(\S+\) and (?:weight|bias) type \(\S+\) should be the same",
        ],
        en=Text(
            title="Two dtypes are mixed in one operation",
            cause=(
                "One tensor is fp32 and the other bf16 or fp16. In an optimizer (lerp): the momentum has the dtype "
                "of the gradient and the parameter another. In a model: the input was not cast, or autocast is off."
            ),
            check=[
                "Make optimizer state in fp32 and cast the gradient to it before lerp.",
                "Was the model converted to bf16 after the optimizer was built?",
            ],
        ),
        zh=Text(
            title="一次运算中混用了两种数据类型",
            cause=(
                "一个张量是 fp32，另一个是 bf16 或 fp16。在优化器中（lerp）：动量与梯度的类型相同，但与参数不同。在"
                "模型中：输入没有转换，或没有开启 autocast。"
            ),
            check=[
                "优化器状态用 fp32，在 lerp 之前把梯度转换过去。",
                "是否在建立优化器之后才把模型转成 bf16？",
            ],
        ),
        commands=[
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="tokenizer-corrupt",
        level=CAUSE,
        patterns=[
            r"Failed to load tokenizer from corrupted file",
            r"tokenizer\.(?:json|pkl|model).{0,100}(?:corrupt|truncated|checksum mismatch|invalid)",
            r"Exception: (?:expected|EOF while parsing|data did not match).{0,80} at line \d+ column \d+",
        ],
        en=Text(
            title="The tokenizer file is damaged",
            cause=(
                "The file was cut off while it was written or downloaded, or it is an LFS pointer and not the file "
                "itself."
            ),
            check=[
                "Is the file only a few hundred bytes long? Then it is a pointer: download again.",
                "Train it again, or delete it and fetch it again.",
            ],
            symptoms=["tokenizer cannot be loaded", "tokenizer damaged"],
        ),
        zh=Text(
            title="分词器文件已损坏",
            cause="文件在写入或下载时被截断，或者它只是 LFS 指针而不是真正的文件。",
            check=[
                "文件是否只有几百字节？若是，它只是指针：请重新下载。",
                "重新训练，或删除后重新下载。",
            ],
            symptoms=["分词器加载失败", "分词器损坏"],
        ),
        commands=[
            "ls -l ~/.cache/ascendchat/tokenizer",
            "ascendchat tokenizer train --help",
        ],
    ),
    Rule(
        id="gradient-missing",
        level=CAUSE,
        patterns=[
            r"element 0 of tensors does not require grad",
            r"Could not run 'npu::\w+' with arguments from the 'CPU' backend",
            r"derivative for .{0,60} is not implemented",
        ],
        en=Text(
            title="An operation has no gradient, or no kernel on this device",
            cause=(
                "All parameters are frozen, the forward ran under no_grad, or an inference-only operator (such as "
                "npu_prompt_flash_attention or npu_add_rms_norm) is used in training."
            ),
            check=[
                "Which operator does the message name? Train with npu_fusion_attention and npu_rms_norm.",
                "With LoRA: are the adapter parameters trainable?",
            ],
        ),
        zh=Text(
            title="某个运算没有梯度，或在该设备上没有实现",
            cause=(
                "所有参数都被冻结、前向在 no_grad 下执行，或训练中使用了仅供推理的算子（如 "
                "npu_prompt_flash_attention、npu_add_rms_norm）。"
            ),
            check=[
                "报错里是哪个算子？训练请用 npu_fusion_attention 和 npu_rms_norm。",
                "使用 LoRA 时：适配器参数是否可训练？",
            ],
        ),
        commands=[
            "ascendchat doctor",
        ],
    ),
]
