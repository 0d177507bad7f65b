"""`ascendchat explain LOG`: rules about downloads and damaged files."""

from __future__ import annotations

from ascendchat.doctor.explain_rules import CAUSE, Rule, Text

RULES = [
    Rule(
        id="hub-network",
        level=CAUSE,
        patterns=[
            r"(?:Connect|Read|Pool)Timeout(?:Error)?\b",
            r"Max retries exceeded with url",
            r"NameResolutionError",
            r"Temporary failure in name resolution",
            r"\[Errno 101\] Network is unreachable",
            r"Couldn't connect to (?:the Hub|'https?://)",
            r"LocalEntryNotFoundError",
            r"ProxyError",
        ],
        en=Text(
            title="The download site could not be reached",
            cause="No route, no proxy, a slow link, or the site is blocked from here.",
            check=[
                "Can this machine reach the site at all? Set a mirror (HF_ENDPOINT) or a proxy (https_proxy).",
                "No internet: download on another machine and copy $ASCENDCHAT_HOME over.",
            ],
            symptoms=["download fails", "cannot download", "slow download", "no internet", "download timeout"],
        ),
        zh=Text(
            title="无法连接下载站点",
            cause="没有网络路由、没有代理、链路太慢，或者从这里访问不了该站点。",
            check=[
                "本机到底能不能访问该站点？可设置镜像（HF_ENDPOINT）或代理（https_proxy）。",
                "没有外网：在另一台机器下载，再把 $ASCENDCHAT_HOME 拷过来。",
            ],
            symptoms=["下载失败", "下载不了", "下载慢", "没有网络", "连不上 huggingface"],
        ),
        commands=[
            "export HF_ENDPOINT=https://hf-mirror.com HF_HUB_DOWNLOAD_TIMEOUT=300",
            "ascendchat doctor",
        ],
    ),
    Rule(
        id="hub-ssl",
        level=CAUSE,
        patterns=[
            r"CERTIFICATE_VERIFY_FAILED",
            r"SSLCertVerificationError",
            r"SSLError\(?",
            r"certificate verify failed",
        ],
        en=Text(
            title="The secure connection was refused (certificate)",
            cause="A company proxy replaces certificates, the machine's certificates are old, or its clock is wrong.",
            check=[
                "Is the date right? Does the proxy need its own certificate? Name it in SSL_CERT_FILE.",
            ],
            symptoms=["certificate error", "SSL error"],
        ),
        zh=Text(
            title="安全连接被拒绝（证书问题）",
            cause="公司代理替换了证书、本机证书过旧，或系统时间不对。",
            check=[
                "系统日期是否正确？代理是否需要自己的证书？用 SSL_CERT_FILE 指定。",
            ],
            symptoms=["证书错误", "SSL 错误"],
        ),
        commands=[
            "date; pip install --upgrade certifi",
            "export SSL_CERT_FILE=/path/to/company-ca.pem REQUESTS_CA_BUNDLE=/path/to/company-ca.pem",
        ],
    ),
    Rule(
        id="hub-access",
        level=CAUSE,
        patterns=[
            r"GatedRepoError",
            r"RepositoryNotFoundError",
            r"(?:401|403|404) Client Error",
            r"HTTP(?:Status)?Error.{0,80}\b(?:401|403|404)\b",
            r"Access to model .{1,80} is restricted",
            r"EntryNotFoundError",
        ],
        en=Text(
            title="The repository does not exist or needs permission (401 / 403 / 404)",
            cause=(
                "404: wrong name, or the file is not in it. 401/403: a private or gated repository and no token, "
                "or its licence was not accepted."
            ),
            check=[
                "Is the name spelt as on the site (owner/name)? Does the mirror carry it?",
                "Accept the licence on its page, then give a token.",
            ],
            symptoms=["access denied", "model needs permission", "download 404"],
        ),
        zh=Text(
            title="仓库不存在或需要授权（401 / 403 / 404）",
            cause="404：名字写错，或其中没有该文件。401/403：私有或受限仓库而没有令牌，或没有接受其许可。",
            check=[
                "名字是否与网站一致（owner/name）？镜像上是否有？",
                "在其页面接受许可，然后设置令牌。",
            ],
            symptoms=["没有权限下载", "模型需要授权"],
        ),
        commands=[
            "export HF_TOKEN=...   # a token with read access",
        ],
    ),
    Rule(
        id="checksum",
        level=CAUSE,
        patterns=[
            r"[Cc]hecksum (?:mismatch|error|does not match|failed)",
            r"(?:sha256|SHA256|md5).{0,80}mismatch",
            r"(?:sha256|SHA256|md5).{0,80}does not match",
            r"(?:sha256|SHA256|md5).{0,80}differs",
            r"[Cc]onsistency check failed.{0,60}file should be of size",
        ],
        en=Text(
            title="A file is not what it should be (checksum)",
            cause="The file was cut off, changed, or damaged on disk or on the way.",
            check=[
                "A download: delete it and fetch again. A checkpoint: go back to the one before it.",
                "Does it happen again on the same disk? Then look at the disk.",
            ],
            symptoms=["file damaged", "download corrupt"],
        ),
        zh=Text(
            title="文件内容与校验和不符",
            cause="文件被截断、修改，或在磁盘或传输中损坏。",
            check=[
                "下载的文件：删除后重新下载。检查点：回退到前一个。",
                "同一磁盘上是否反复出现？若是，检查磁盘。",
            ],
            symptoms=["文件损坏", "校验失败", "下载的文件不对"],
        ),
        commands=[
            "ascendchat data verify",
            "ls -l ~/.cache/ascendchat/runs",
        ],
    ),
    Rule(
        id="safetensors",
        level=CAUSE,
        patterns=[
            r"SafetensorError",
            r"Error while deserializing header",
            r"HeaderToo(?:Large|Small)",
            r"MetadataIncompleteBuffer",
            r"InvalidHeaderDeserialization",
        ],
        en=Text(
            title="A safetensors file is damaged or is not one",
            cause=(
                "The file was cut off (MetadataIncompleteBuffer), is an LFS pointer or an HTML error page "
                "(HeaderTooLarge), or is empty (HeaderTooSmall)."
            ),
            check=[
                "How long is the file, and what are its first bytes?",
                "Download it again, or use the checkpoint before it.",
            ],
        ),
        zh=Text(
            title="safetensors 文件损坏或不是该格式",
            cause=(
                "文件被截断（MetadataIncompleteBuffer）；是 LFS 指针或网页错误页（HeaderTooLarge）；或为空（"
                "HeaderTooSmall）。"
            ),
            check=[
                "文件多大？开头的字节是什么？",
                "重新下载，或使用前一个检查点。",
            ],
        ),
        commands=[
            "ls -l *.safetensors; head -c 200 model.safetensors | strings | head -3",
        ],
    ),
    Rule(
        id="pickle-refused",
        level=CAUSE,
        patterns=[
            r"Weights only load failed",
            r"(?:_pickle\.)?UnpicklingError",
            r"PytorchStreamReader failed",
        ],
        en=Text(
            title="A .pt / .bin file cannot be loaded safely, or is damaged",
            cause=(
                "torch refuses files that hold more than tensors, and files that were cut off. ascendchat itself "
                "writes safetensors only."
            ),
            check=[
                "Is the file complete? Compare its size with the source.",
                "Convert it to safetensors where it came from.",
            ],
        ),
        zh=Text(
            title=".pt / .bin 文件无法安全加载，或已损坏",
            cause="torch 拒绝加载含有张量以外内容的文件，以及被截断的文件。ascendchat 自己只写 safetensors。",
            check=[
                "文件是否完整？与来源比较大小。",
                "在来源处把它转换成 safetensors。",
            ],
        ),
        commands=[
            (
                'ls -l *.pt *.bin 2>/dev/null; python -c "import zipfile, sys; '
                'print(zipfile.is_zipfile(sys.argv[1]))" FILE'
            ),
        ],
    ),
    Rule(
        id="git-lfs-pointer",
        level=CAUSE,
        patterns=[
            r"version https://git-lfs\.github\.com/spec",
        ],
        en=Text(
            title="The file is a Git LFS pointer, not the data",
            cause="The repository was cloned without LFS, so only short text pointers came.",
            check=[
                "Are the model files only about 130 bytes long?",
            ],
        ),
        zh=Text(
            title="文件是 Git LFS 指针，而不是数据本身",
            cause="克隆仓库时没有用 LFS，只得到了简短的文本指针。",
            check=[
                "模型文件是否只有约 130 字节？",
            ],
        ),
        commands=[
            "git lfs install && git lfs pull",
        ],
    ),
]
