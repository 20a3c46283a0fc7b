"""All networks of the set."""

from __future__ import annotations

import actor
import convnext
import diffusion
import graph
import hub
import llama
import lstm
import mixer
import moe
import multitask
import resnet
import seq2seq
import statespace
import unet
import vit

NETWORKS = (
    llama.NETWORK,
    moe.NETWORK,
    seq2seq.NETWORK,
    hub.BERT,
    vit.NETWORK,
    hub.VIT,
    mixer.NETWORK,
    convnext.NETWORK,
    resnet.POST,
    resnet.PRE,
    unet.NETWORK,
    diffusion.NETWORK,
    lstm.NETWORK,
    statespace.NETWORK,
    graph.NETWORK,
    actor.NETWORK,
    multitask.NETWORK,
)
