"""Networks for pictures: a ViT, a ResNet with group norm, a U-Net, a DCGAN discriminator, a denoiser."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class PatchEmbed(nn.Module):
    def __init__(self, patch=4, in_chans=3, dim=48):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, kernel_size=patch, stride=patch)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class MHSA(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def split(self, x):
        B, N, C = x.shape
        return self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.split(x)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class ViTBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), MHSA(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, side=16, patch=4, dim=48, depth=4, num_classes=6):
        super().__init__()
        self.patch_embed = PatchEmbed(patch, 3, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*[ViTBlock(dim) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                nn.init.zeros_(m.bias)

    def embed(self, x):
        x = self.patch_embed(x)
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.embed(x)))[:, 0])


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.gn1 = nn.GroupNorm(4, planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.gn2 = nn.GroupNorm(4, planes)
        self.shortcut = nn.Identity()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride, bias=False), nn.GroupNorm(4, planes))

    def forward(self, x):
        out = F.relu(self.gn1(self.conv1(x)))
        out = self.gn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNetGN(nn.Module):
    def __init__(self, num_classes=6, widths=(16, 32, 32), blocks=2):
        super().__init__()
        self.conv1, self.gn1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.GroupNorm(4, widths[0])
        stages, previous = [], widths[0]
        for i, width in enumerate(widths):
            layers = []
            for j in range(blocks):
                layers.append(BasicBlock(previous, width, 2 if i and not j else 1))
                previous = width
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3 = stages
        self.fc = nn.Linear(previous, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x):
        x = F.relu(self.gn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x)))

    def forward(self, x):
        return self.fc(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class DoubleConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.up = nn.ConvTranspose2d(cin, cout, 2, stride=2)
        self.conv = DoubleConv(2 * cout, cout)

    def forward(self, x, skip):
        return self.conv(torch.cat([skip, self.up(x)], dim=1))


class UNet(nn.Module):
    def __init__(self, in_ch=1, n_classes=3, base=8):
        super().__init__()
        self.inc = DoubleConv(in_ch, base)
        self.down1, self.down2 = DoubleConv(base, 2 * base), DoubleConv(2 * base, 4 * base)
        self.down3 = DoubleConv(4 * base, 8 * base)
        self.up1, self.up2, self.up3 = Up(8 * base, 4 * base), Up(4 * base, 2 * base), Up(2 * base, base)
        self.outc = nn.Conv2d(base, n_classes, 1)

    def encode(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        return x1, x2, x3, self.down3(F.max_pool2d(x3, 2))

    def forward(self, x):
        x1, x2, x3, x4 = self.encode(x)
        return self.outc(self.up3(self.up2(self.up1(x4, x3), x2), x1))


def weights_init(m):
    if isinstance(m, nn.Conv2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Discriminator(nn.Module):
    def __init__(self, nc=3, ndf=16):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, ndf * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 4, 1, 4, 1, 0, bias=False),
        )
        self.apply(weights_init)

    def forward(self, x):
        return self.main(x).view(-1)


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
        args = t[:, None].float() * freqs[None]
        return torch.cat([args.sin(), args.cos()], dim=-1)


class TimeBlock(nn.Module):
    def __init__(self, dim, dim_out, time_dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, dim_out * 2))
        self.conv1, self.norm1 = nn.Conv2d(dim, dim_out, 3, padding=1), nn.GroupNorm(4, dim_out)
        self.conv2, self.norm2 = nn.Conv2d(dim_out, dim_out, 3, padding=1), nn.GroupNorm(4, dim_out)
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, temb):
        scale, shift = self.mlp(temb)[..., None, None].chunk(2, dim=1)
        h = self.norm1(self.conv1(x)) * (scale + 1) + shift
        h = self.norm2(self.conv2(F.silu(h)))
        return F.silu(h) + self.res_conv(x)


class Denoiser(nn.Module):
    def __init__(self, dim=16, time_dim=64):
        super().__init__()
        self.time_mlp = nn.Sequential(
            SinusoidalPosEmb(dim), nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        self.init_conv = nn.Conv2d(1, dim, 3, padding=1)
        self.down, self.shrink = TimeBlock(dim, dim, time_dim), nn.Conv2d(dim, 2 * dim, 4, 2, 1)
        self.mid = TimeBlock(2 * dim, 2 * dim, time_dim)
        self.grow, self.up = nn.ConvTranspose2d(2 * dim, dim, 4, 2, 1), TimeBlock(2 * dim, dim, time_dim)
        self.final = nn.Conv2d(dim, 1, 1)

    def forward(self, x, t):
        temb = self.time_mlp(t)
        h = self.init_conv(x)
        skip = self.down(h, temb)
        h = self.grow(self.mid(self.shrink(skip), temb))
        return self.final(self.up(torch.cat([h, skip], dim=1), temb))


class GaussianDiffusion(nn.Module):
    """Draws a time and the noise, gives the predicted and the true noise."""

    def __init__(self, model, timesteps=100):
        super().__init__()
        self.model, self.timesteps = model, timesteps
        s = torch.linspace(0, 1, timesteps + 1)
        bar = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = (1 - bar[1:] / bar[:-1]).clamp(0, 0.999)
        bar = torch.cumprod(1 - betas, dim=0)
        self.register_buffer("sqrt_alphas_cumprod", bar.sqrt())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1 - bar).sqrt())

    def q_sample(self, x, t, noise):
        a, b = self.sqrt_alphas_cumprod[t], self.sqrt_one_minus_alphas_cumprod[t]
        return a[:, None, None, None] * x + b[:, None, None, None] * noise

    def forward(self, x):
        t = torch.randint(0, self.timesteps, (x.shape[0],))
        noise = torch.randn_like(x)
        return self.model(self.q_sample(x, t, noise), t), noise
