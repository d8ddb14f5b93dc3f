# SPDX-License-Identifier: MIT
"""What the names of parameters and attributes mean, as a table.

A role is what a call or a constructor needs to be given: "query", "num_heads",
"mask", ... Names are compared in lower case and without underscores.
"""

import re

from .words import says_added, words

_CALL = {
    "sliding_window": "window",
    "query": (
        "q query queries xq qx inputq queryinput hiddenq qs qin target tgt trg qvec "
        "queryvec decoderstate decoderhidden decoderhiddenstate dechidden decstate latents"
    ),
    "key": "k key keys xk kx inputk keyinput ks kin kvec keyvec",
    "value": "v value values val vals xv vx inputv valueinput vs vin vvec valuevec",
    "x": (
        "x inputs input inp hiddenstates hiddenstate hidden states xs embeddings tokens src seq "
        "sequence emb embs"
    ),
    "context": (
        "context ctx memory encoderhiddenstates encoutput encoderoutput y kv "
        "keyvalue keyvaluestates crossinput contextstates cond x2 xkv source z "
        "encoderout encodeoutput encodeoutputs mem enc encout encoderoutputs encoutputs encoderstates encoderhidden "
        "encstates eoutput eoutputs encoded encodings memories encoder history hist "
        "behaviors behaviours userhistory"
    ),
    "mask": (
        "mask attnmask attentionmask srcmask tgtmask trgmask causalmask msk selfmask "
        "attnbias attentionbias maskbias scorebias scoresbias additivemask addmask m "
        "adj adjacency adjmat adjmatrix adjacencymatrix visible allowed forbidden blocked"
    ),
    "context_mask": (
        "encoderattentionmask encodermask contextmask memorymask crossmask "
        "crossattentionmask crossattnmask memoryattentionmask contextattentionmask "
        "encattnmask"
    ),
    "padding": (
        "keypaddingmask paddingmask padding padmask srckeypaddingmask keymask "
        "memorykeypaddingmask kpm keyvalidmask kvmask kmask valid pad ispad"
    ),
    "lengths": "validlens validlen nvalid numvalid lengths seqlens keylengths lens validlengths",
    "is_causal": "iscausal causal usecausal causalflag applycausal usecausalmask",
    "need_weights": (
        "needweights returnweights returnattn returnattention outputattentions "
        "returnattentionweights returnattnweights getattn needattn"
    ),
    "average_weights": "averageattnweights averageweights",
    "dropout": (
        "dropout dropoutp pdropout dropoutrate attndropout p droprate dropoutprob "
        "attentiondropout attnpdrop attnp attnpdropout attndrop drate"
    ),
    "training": "training train istraining trainmode",
    "scale": "scale scaling softmaxscale scalefactor scalingfactor",
    "weights": "params parameters weights weightdict statedict paramdict",
    "shares_heads": "enablegqa usegqa gqa",
    "image": "hw hwshape xsize imagesize resolution spatialshape",
    "batch": "batchsize bs bsz",
    "query_length": "querylength",
    "key_length": "keylength",
    "zero": (
        "startpos offset layeridx layerid step startposition curpos positionoffset "
        "posoffset seqoffset pastlen pastlength cachepos cacheposition startidx "
        "currentpos ropeoffset startindex"
    ),
    "rotation": (
        "freqscis freqs cos sin rotaryemb rotaryposemb positionembeddings rope ropecos "
        "ropesin freqscos freqssin posemb posembed posembeds encoding rotary freqscomplex "
        "rotaryembedding rotaryembeddings rotarypos cossin sincos ropeemb ropeembed "
        "cosbuffer sinbuffer coscached sincached coscache sincache cosbuf sinbuf "
        "rotaryfrequencies rotaryfreqs ropefreqs ropefrequencies freqstensor "
        "rotarycos rotarysin cosines sines cosine sine costable sintable"
    ),
    "position_ids": (
        "positionids posids tokenpositions inputpositions inputpos positionid qpos"
    ),
    "positions": (
        "posembedding posembeddings posenc relposenc posencoding posencodings positionalencoding "
        "positionalencodings relposemb relposembedding relativepositionembedding"
    ),
    "residual": "residual",
    "device": "device dev",
    "past": "past pastkv kvcache cache layerpast usecache pastkeyvalue pastkeyvalues",
}
_SIZES = {
    "num_heads": (
        "numheads nheads heads nhead numheaders numheader h nh numhead nhd numattentionheads "
        "numqueryheads nqheads numqheads nheadsq hq attnheads headscount headcount "
        "numberofheads queryheads qheads nheadq headsq nqueryheads "
        "nqhead numqhead numheadsq"
    ),
    "num_kv_heads": (
        "numkvheads kvheads nkvheads numgroups groups numquerygroups ngroups "
        "numkeyvalueheads hkv nkv nkvhead g numkvgroups querygroups kvgroups "
        "nkvhead nheadkv headskv headkv numkv"
    ),
    "embed_dim": (
        "dmodel embeddim dim hiddensize nembd embdim emb e embedsize modeldim "
        "hiddendim din dimin embeddingdim embeddingsize embedding features infeatures inputdim dmod "
        "inputsize numhiddens modeldimension channels c embsize nembed kdim vdim "
        "qdim adim hiddenstate querydim keysize querysize valuesize querysdim dinput "
        "querydimension contextdim crossdim crossattentiondim dcontext dcross nx inplanes planes inp ninp "
        "keyfilters valuefilters totalkeyfilters totalvaluefilters keydepth valuedepth"
    ),
    "out_dim": (
        "dout odim dimout oup outplanes outdim outputdim outfeatures outputsize doutput "
        "outputfilters outputdepth"
    ),
    "head_dim": (
        "headdim dhead dk dimhead headsize dv d dh headdimension qkvdim sizeperhead "
        "dkey dvalue kdimhead perheaddim keydim valuedim valdim attentionheadsize "
        "rotarydim ropedim rotdim rotaryndims querypreattnscalar"
    ),
    "max_length": (
        "maxlen blocksize contextlength maxseqlen maxlength contextsize seqlen "
        "maxpositionembeddings seqlength maxseqlength ctxlen contextlen "
        "numtokens npatch numpatch maxt nctx maxsequencelength length"
    ),
    "window": "windowsize winsize ws win",
    "sliding_window": (
        "slidingwindow slidingwindowsize localwindow localwindowsize attentionwindow "
        "attentionwindowsize attnwindow attnwindowsize"
    ),
    "resolution": (
        "inputresolution imgsize imagesize imsize resolution featsize fmapsize featuremapsize "
        "spatialsize hw hwshape boardsize gridsize mapsize inhw inputhw imghw imagehw featurehw "
        "inputshape imgshape imageshape spatialshape"
    ),
}
_CONSTRUCTOR = {
    "dropout": _CALL["dropout"] + " residdropout residpdrop projdrop resdropout",
    "bias": (
        "bias qkvbias usebias outbias projbias attentionbias bqkv addbias inbias "
        "inputbias outputbias withbias"
    ),
    "batch_first": "batchfirst",
    "is_causal": (
        "iscausal causal usecausal masked autoregressive ismasked isdecoder decoder"
    ),
    "device": "device dev",
    "batch": _CALL["batch"] + " maxbatchsize maxbatch",
    "dtype": "dtype",
    "embed_dim": "embed hidden hid",
    "temperature": "temperature temp tau",
    "activation": "activation act activationfn actfn nonlinearity actlayer",
    "norm": "norm normlayer",
    "attention": "attention attn attentionlayer innerattention mechanism attnlayer",
    "config": "config cfg args conf hparams params settings modelargs opts",
}


def _table(*groups: dict[str, str]) -> dict[str, str]:
    return {
        name: role
        for group in groups
        for role, names in group.items()
        for name in names.split()
    }


CALL = _table(_SIZES, _CALL)  # where a name is in both, as a call has it
CONSTRUCTOR = _table(_SIZES, _CONSTRUCTOR)
ATTRIBUTES = _table(_SIZES)
# Masks that are added to the scores, as these names say.
ADDITIVE = {"attnbias", "attentionbias", "maskbias", "scorebias", "scoresbias"}
ADDITIVE |= {"additivemask", "addmask", "bias"}
# Sequences that may ask or be asked.
VAGUE = {"x", "y", "z", "x2", "source", "input", "inputs"}
TENSORS = ("query", "key", "value", "x", "context")
SIZES = tuple(_SIZES)

_OF_CLASS = re.compile(r"^_\w+?__(?=\w)")
_PARTS = re.compile(
    r"(?P<dropout>drop|pdrop)|(?P<epsilon>eps)|(?P<bias>(^|_)bias($|_))|"
    r"(?P<max_length>max_(pos|seq|len)|block_size)|(?P<index>((layer|block)_)?(idx|id|index)$)"
)
_WEIGHT = re.compile(
    r"w_?[qkvo]\d?|[qkvo]_?w|w_?qkv|w_?kv|b_?[qkvo]|[qkvo]_?b|b_?qkv|w_?out|b_?out|"
    r"w_?(query|key|value|queries|keys|values|output|proj|concat|o_proj)|"
    r"(q|k|v|o|out|qkv|in|c|query|key|value|output)_(proj|projection)_?"
    r"(w|weight|bias|b)?|"
    r"(q|k|v|o|out|qkv|in|query|key|value|output)_(w|weight|weights|bias|matrix)|"
    r"(to|fc|lin|linear|proj|dense)_(q|k|v|o|out|qkv|kv|query|key|value|output)|"
    r"(q|k|v|o|out|qkv|query|key|value|output)_(fc|lin|linear|layer|dense)|"
    r"(c|w|b)_attn_?(w|weight|b|bias)?|b_proj|"
    r"in_proj_(weight|bias)|out_proj_(weight|bias)|(weights?|bias)_\w+|w|wo|bo|b"
)
_SPEAKING = re.compile(
    r"(^|[._])(w|b|to|c|fc|lin|linear|proj|project|projection|in|conv|attn?|attention)?_?"
    r"(q|k|v|o|qkv|kv|query|queries|key|keys|val|vals|value|values|in_proj|attn|out|"
    r"output)"
    r"(_?(w|b|proj|lin|linear|layer|projection|weight|bias|net|fc|transform|map|conv|l))?s?"
    r"\d?($|[._])"
)


# torch.nn.functional.multi_head_attention_forward, and what is called like it: inputs
# (L, B, E), masks in which True blocks, matrices (out, in).
PYTORCHS_LAYER = frozenset(
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k "
    "bias_v add_zero_attn dropout_p out_proj_weight out_proj_bias".split()
)
# Beside `in_proj_weight`, the roles of those whose names alone would be misread;
# "nothing" is left out.
PYTORCHS_ROLES = {
    "embed_dim_to_check": "embed_dim",
    "add_zero_attn": "flag",
    **dict.fromkeys(
        "bias_k bias_v use_separate_proj_weight q_proj_weight k_proj_weight "
        "v_proj_weight static_k static_v".split(),
        "nothing",
    ),
}


def is_added(name: str) -> bool:
    """Whether a mask of this name is added to the scores."""
    return normal(name) in ADDITIVE or says_added(name) or words(name)[-1:] == ["bias"]


def normal(name: str) -> str:
    """`name` as the tables have it: lower case, without underscores, and without the
    class that Python puts before names with two."""
    return _OF_CLASS.sub("", name).lower().replace("_", "")


def role_of_name(name: str) -> str | None:
    """The role of a parameter of a call that the tables give to its name."""
    return CALL.get(normal(name))


def as_written(name: str) -> str:
    """`name` as a class has it in its text, where Python put the class before it."""
    return _OF_CLASS.sub("__", name)


def part_of(name: str) -> str | None:
    """The role by a part of a name, as in attention_probs_dropout_prob."""
    found = _PARTS.search(name.lower())
    return found.lastgroup if found else None


def is_weight(name: str) -> bool:
    """Whether a parameter of this name takes a weight or a bias."""
    return _WEIGHT.fullmatch(name.lower()) is not None


def projection(name: str) -> str:
    """ "q", "k" or "v", where a weight's name says that it is of that alone."""
    found = _SPEAKING.search(name.lower())
    of = found[3] if found else ""
    known = ("q", "k", "v", "query", "key", "value", "queries", "keys", "values")
    known += ("val", "vals")
    return of[0] if of in known else ""


def speaks(name: str) -> bool:
    """Whether a weight's name says which projection it belongs to."""
    return _SPEAKING.search(name.lower()) is not None
