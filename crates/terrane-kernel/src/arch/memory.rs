//! `memcpy` and its sisters, which compiled code calls and no library brings here.
//!
//! What is short goes by 16 bytes. Pages and the like go by the string instructions on real processors. Under emulation those are slow, and so are the
//! SSE registers, which lie in memory there: it is fastest by general registers (a page zeroed: 0.8 us, by 16 bytes 1.0, by `rep stosq` 1.55), and a page that is
//! zeroed is the largest part of a page fault. In assembly, because a compiler may turn a loop that copies into a call of `memcpy`.

use core::arch::global_asm;
use core::sync::atomic::{AtomicBool, Ordering};

global_asm!(
    r#"
    .pushsection .text.memory, "ax", @progbits
    .global memcpy
    .global memmove
    .global memset
    .global memcmp
    .global bcmp
    .global copy_used_bytes
    .global strlen

    .balign 16
memmove:
    mov rax, rdi
    sub rax, rsi                # dst - src, unsigned: below n where copying upwards would overwrite the source
    cmp rax, rdx
    jb 20f
    .balign 16
copy_used_bytes:
memcpy:
    mov rax, rdi
    cmp rdx, 16
    jb 10f
    cmp rdx, 512
    jae 5f
9:
    movups xmm1, [rsi + rdx - 16]
    lea r8, [rdi + rdx - 16]    # the last 16 bytes, stored at the end
    sub rdx, 16
    jz 3f
    sub rdx, 64
    jb 2f
1:  movups xmm2, [rsi]
    movups xmm3, [rsi + 16]
    movups xmm4, [rsi + 32]
    movups xmm5, [rsi + 48]
    movups [rdi], xmm2
    movups [rdi + 16], xmm3
    movups [rdi + 32], xmm4
    movups [rdi + 48], xmm5
    add rsi, 64
    add rdi, 64
    sub rdx, 64
    jae 1b
2:  add rdx, 64
    jz 3f
4:  movups xmm2, [rsi]
    movups [rdi], xmm2
    add rsi, 16
    add rdi, 16
    sub rdx, 16
    ja 4b
3:  movups [r8], xmm1
    ret

5:  cmp byte ptr [rip + {string_instructions}], 0
    je 6f
    mov rcx, rdx
    rep movsb
    ret
6:  sub rdx, 128
    .set at, 0
    .rept 16
    mov r8, [rsi + at]
    mov [rdi + at], r8
    .set at, at + 8
    .endr
    add rsi, 128
    add rdi, 128
    cmp rdx, 128
    jae 6b
    test rdx, rdx               # what is left: by its last 16 bytes, of which some may be done already
    jz 8f
    cmp rdx, 16
    jae 9b
7:  movzx ecx, byte ptr [rsi]
    mov [rdi], cl
    inc rsi
    inc rdi
    dec rdx
    jnz 7b
8:  ret

10: cmp edx, 8                  # below 16: from both ends, loads before stores, so that overlaps do no harm
    jb 11f
    mov rcx, [rsi]
    mov r8, [rsi + rdx - 8]
    mov [rdi], rcx
    mov [rdi + rdx - 8], r8
    ret
11: cmp edx, 4
    jb 12f
    mov ecx, [rsi]
    mov r8d, [rsi + rdx - 4]
    mov [rdi], ecx
    mov [rdi + rdx - 4], r8d
    ret
12: test edx, edx
    jz 13f
    mov r10d, edx               # the first byte, the middle one, the last: some of them the same
    shr r10d, 1
    movzx ecx, byte ptr [rsi]
    movzx r8d, byte ptr [rsi + r10]
    movzx r9d, byte ptr [rsi + rdx - 1]
    mov [rdi], cl
    mov [rdi + r10], r8b
    mov [rdi + rdx - 1], r9b
13: ret

20: # downwards
    mov rax, rdi
    cmp rdx, 16
    jb 10b
    movups xmm1, [rsi]
21: sub rdx, 16
    jbe 22f
    movups xmm2, [rsi + rdx]
    movups [rdi + rdx], xmm2
    jmp 21b
22: movups [rdi], xmm1
    ret

    .balign 16
memset:
    mov rax, rdi
    movzx ecx, sil
    movabs r8, 0x0101010101010101
    imul rcx, r8
    cmp rdx, 512
    jae 36f
38: cmp rdx, 16
    jb 33f
    movq xmm0, rcx
    punpcklqdq xmm0, xmm0
    movups [rdi + rdx - 16], xmm0
    sub rdx, 64
    jb 31f
    .balign 16
30: movups [rdi], xmm0
    movups [rdi + 16], xmm0
    movups [rdi + 32], xmm0
    movups [rdi + 48], xmm0
    add rdi, 64
    sub rdx, 64
    jae 30b
31: add rdx, 64
    jz 35f
32: sub rdx, 16                 # what is left below 16 is in the store at the end
    jb 35f
    movups [rdi], xmm0
    add rdi, 16
    jmp 32b
33: cmp edx, 4
    jb 34f
    mov [rdi], ecx              # 4 to 15: two stores of 8 or of 4, which may overlap
    mov [rdi + rdx - 4], ecx
    cmp edx, 8
    jb 35f
    mov [rdi], rcx
    mov [rdi + rdx - 8], rcx
    ret
34: test edx, edx
    jz 35f
    mov [rdi], cl
    mov [rdi + rdx - 1], cl
    shr edx, 1
    mov [rdi + rdx], cl
35: ret

36: cmp byte ptr [rip + {string_instructions}], 0
    jne 39f
37: .set at, 0
    .rept 32
    mov [rdi + at], rcx
    .set at, at + 8
    .endr
    add rdi, 256
    sub rdx, 256
    cmp rdx, 256
    jae 37b
    jmp 38b
39: mov r9, rdi
    mov eax, esi
    mov rcx, rdx
    rep stosb
    mov rax, r9
    ret

    .balign 16
bcmp:
memcmp:
    sub rdx, 8
    jb 41f
40: mov rax, [rdi]
    mov rcx, [rsi]
    cmp rax, rcx
    jne 44f
    add rdi, 8
    add rsi, 8
    sub rdx, 8
    jae 40b
41: add rdx, 8
    jz 43f
42: movzx eax, byte ptr [rdi]
    movzx ecx, byte ptr [rsi]
    sub eax, ecx
    jne 45f
    inc rdi
    inc rsi
    dec rdx
    jnz 42b
43: xor eax, eax
45: ret
44: bswap rax                   # the first byte that differs decides
    bswap rcx
    cmp rax, rcx
    sbb eax, eax
    or eax, 1
    ret

    .balign 16
strlen:
    xor eax, eax
50: cmp byte ptr [rdi + rax], 0
    je 51f
    inc rax
    jmp 50b
51: ret
    .popsection
"#,
    string_instructions = sym STRING_INSTRUCTIONS,
);

/// Set where the string instructions are fast: not where they are emulated.
static STRING_INSTRUCTIONS: AtomicBool = AtomicBool::new(false);

/// Says that the string instructions are fast here.
pub fn use_string_instructions() {
    STRING_INSTRUCTIONS.store(true, Ordering::Relaxed);
}

unsafe extern "C" {
    /// `memcpy` by another name, of which the compiler knows nothing: for bytes that programs may be using meanwhile.
    pub fn copy_used_bytes(to: *mut u8, from: *const u8, len: usize);
}
