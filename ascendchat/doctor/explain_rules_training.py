"""`ascendchat explain LOG`: rules about runs that go on but do not go well: divergence, no progress, poor answers."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, NOTE, Rule, Text

RULES = [
    Rule(
        id="diverged",
        level=CAUSE,
        patterns=[
            r"the loss of step \d+ is (?P<loss>\S+) \(running mean (?P<mean>[^\s)]+)\)",
        ],
        en=Text(
            title="ascendchat stopped because the loss diverged: {loss}, after a mean of {mean}",
            cause=(
                "The last checkpoint is before it. The same command meets the same batch again and stops at the same "
                "place. Usual reasons: the learning rate is too high for this batch and "
                "data; 8-bit (--fp8) or fp16 numbers; a damaged or strange piece of data at this batch."
            ),
            check=[
                "Did the loss or the gradient norm rise over many steps? Then the rate: --lr-multiplier 0.5.",
                "Did it come from nowhere at one batch? Then the data, or numbers: leave out --fp8, or try "
                "--attention reference for some steps.",
                "Another rate or seed is another run: give it another --run NAME.",
            ],
            symptoms=["loss diverges", "loss explodes", "loss spike", "gradient explodes"],
        ),
        zh=Text(
            title="loss 发散，ascendchat 停止：{loss}，此前均值 {mean}",
            cause=(
                "最近的检查点在它之前。同一条命令会遇到同一个批次，停在同一处。常见原因：学习率对这种批"
                "量和数据来说太高；8 位（--fp8）或 fp16 数值；这个批次里有损坏或奇怪的数据。"
            ),
            check=[
                "loss 或梯度范数是不是很多步里一直在升？那就是学习率：--lr-multiplier 0.5。",
                "是不是在某个批次突然出现？那就是数据或数值：去掉 --fp8；或用 --attention reference 试若干步。",
                "换学习率或种子就是另一次训练：给它另一个 --run NAME。",
            ],
            symptoms=["loss 发散", "loss 突然变大", "loss 爆炸", "梯度爆炸"],
        ),
        commands=[
            "ascendchat base --run NEW-NAME --lr-multiplier 0.5   # with your other flags; also for mid and sft",
            "ascendchat data verify",
        ],
    ),
    Rule(
        id="loss-flat",
        level=NOTE,
        patterns=[
            # loss stands in brackets so that the scan looks for the rarer word, not for the one on every line
            r"(?:\b[Ll]oss) (?:does|is|will|has) not (?:fall|drop|decreas|improv|go(?:ing)? down)",
            r"(?:\bloss) ?(?:一直)?不(?:下降|降|收敛)",
        ],
        en=Text(
            title="The loss does not fall",
            cause=(
                "Too few tokens yet (a base model needs hundreds of steps to leave its plateau), a learning rate that "
                "is far too low or too high, data that was prepared with another tokenizer, conversations whose "
                "replies are all masked or cut off, or a curve that has reached what this size can learn."
            ),
            check=[
                "Does the training loss stand still, or only the validation loss? Only the second: the data repeats.",
                "Does the small recipe fall as shown in the README? Then it is the data or the settings.",
            ],
            symptoms=[
                "loss does not decrease",
                "loss not falling",
                "loss stuck",
                "loss plateau",
                "model does not learn",
                "not converging",
            ],
        ),
        zh=Text(
            title="loss 不下降",
            cause=(
                "训练的 token 还太少（基座模型要几百步才离开平台期）；学习率过低或过高；数据是用另一个分词器处理的；对"
                "话的回答全被屏蔽或截断；或者已经到了这个规模能学到的程度。"
            ),
            check=[
                "是训练 loss 不动，还是只有验证 loss 不动？只有后者：数据在重复。",
                "小配方的 loss 能像 README 那样下降吗？能的话，问题在数据或设置。",
            ],
            symptoms=["loss 不下降", "loss 不降", "不收敛", "loss 卡住不动", "模型学不会", "训练没有效果"],
        ),
        commands=[
            "ascendchat speedrun --recipe recipes/tiny-cpu.yaml",
            "ascendchat tokenizer eval FILE   # does this tokenizer fit the text?",
        ],
    ),
    Rule(
        id="standstill",
        level=NOTE,
        patterns=[
            r"(?:[Tt]raining|[Rr]un|[Pp]rogram|[Jj]ob|[Pp]rocess) hangs\b",
            r"(?:[Tt]raining|[Rr]un|[Pp]rogram|[Jj]ob|[Pp]rocess) (?:is|got) stuck\b",
            r"训练(?:卡住|卡死|不动|挂住)",
        ],
        en=Text(
            title="The run stands still without an error",
            cause=(
                "Several ranks: one of them died, waits for a download or runs other code, and the rest wait for it "
                "until the timeout of the collective (HCCL: 1836 s). One device: the first step compiles operators, "
                "data is being downloaded or tokenized, or the disk is slow."
            ),
            check=[
                "Do all devices show the same use? The rank whose device is idle is the one the others wait for.",
                "Does it stand at the first step? Compiling takes minutes on 910A and 310P, and with torch.compile.",
                "Where does Python wait? `py-spy dump --pid PID` shows the line of every thread.",
            ],
            symptoms=[
                "training hangs",
                "training stuck",
                "stuck at the first step",
                "no output",
                "freezes",
                "deadlock",
                "program hangs",
                "no progress",
                "waiting forever",
            ],
        ),
        zh=Text(
            title="训练停住不动，也没有报错",
            cause=(
                "多个 rank：其中一个已经死掉、在等下载或执行了别的代码，其余都在等它，直到集合通信超时（HCCL 为 1836 "
                "秒）。单个设备：第一步在编译算子，正在下载或分词，或磁盘太慢。"
            ),
            check=[
                "各设备的利用率一样吗？设备空闲的那个 rank 就是大家在等的。",
                "是不是停在第一步？910A、310P 上以及使用 torch.compile 时，编译要好几分钟。",
                "Python 停在哪里？`py-spy dump --pid PID` 会显示每个线程所在的行。",
            ],
            symptoms=["训练卡住", "卡死", "卡住不动", "训练不动", "没有输出", "没反应", "挂住", "死锁", "一直等待"],
        ),
        commands=[
            "ascendchat doctor --watch",
            "ascendchat explain RUN-FOLDER   # the logs of all ranks together",
            "ascendchat doctor --devices 2   # does a collective work alone?",
        ],
    ),
    Rule(
        id="poor-answers",
        level=NOTE,
        patterns=[
            r"(?:[Oo]utput|[Aa]nswers?|[Rr]epl(?:y|ies)) (?:is|are) gibberish\b",
            r"(?:[Oo]utput|[Aa]nswers?|[Rr]epl(?:y|ies)) (?:is|are) garbled\b",
            r"(?:输出|回答)(?:是|都是|全是)?乱码",
        ],
        en=Text(
            title="The model answers with gibberish, or repeats itself",
            cause=(
                "A base model continues text and does not answer: it needs mid and sft. A small or barely trained "
                "model writes fluent nonsense. Broken characters come from a terminal that is not UTF-8, or from a "
                "tokenizer that does not belong to the model."
            ),
            check=[
                "Which stage is loaded? For conversations it should be sft (--stage sft).",
                "Is it better with --temperature 0? Then the sampling was too hot for this model.",
                "What do the scores say? `ascendchat eval base` and `ascendchat eval chat` measure the model.",
            ],
            symptoms=[
                "gibberish",
                "garbled output",
                "garbage output",
                "nonsense answers",
                "model repeats itself",
                "wrong characters",
                "mojibake",
                "chat answers badly",
            ],
        ),
        zh=Text(
            title="模型的回答是乱码、胡言乱语或不断重复",
            cause=(
                "基座模型只会续写，不会回答：还需要 mid 和 sft。太小或训练太少的模型会写出通顺的胡话。字符本身破损，则"
                "是终端不是 UTF-8，或分词器与模型不配套。"
            ),
            check=[
                "加载的是哪个阶段？对话应当用 sft（--stage sft）。",
                "--temperature 0 时好一些吗？那就是采样温度对这个模型太高。",
                "分数如何？`ascendchat eval base` 和 `ascendchat eval chat` 会测量模型。",
            ],
            symptoms=["chat 输出乱码", "乱码", "胡言乱语", "回答不通顺", "答非所问", "不断重复", "回答很差"],
        ),
        commands=[
            "ascendchat chat --stage sft --temperature 0",
            "ascendchat eval base",
            "locale   # must say UTF-8",
        ],
    ),
]
