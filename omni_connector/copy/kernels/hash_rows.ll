; clang 19, sha256 of the C 0de0d91ada38449c
; scripts/compile_kernels.py has made this file.

@FIRST_SUMS = internal unnamed_addr constant [8 x i64] [i64 3266489917, i64 -7046029288634856825, i64 -4417276706812531889, i64 1609587929392839161, i64 -8796714831421723037, i64 2246822519, i64 2870177450012600261, i64 2654435761], align 16
@SECRET = internal unnamed_addr constant [192 x i8] c"\B8\FEl9#\A4K\BE|\01\81,\F7!\AD\1C\DE\D4m\E9\83\90\97\DBr@\A4\A4\B7\B3g\1F\CBy\E6N\CC\C0\E5x\82Z\D0}\CC\FFr!\B8\08Ft\F7C$\8E\E05\90\E6\81:&L<(R\BB\91\C3\00\CB\88\D0e\8B\1BS.\A3qdH\97\A2\0D\F9N8\19\EFF\A9\DE\AC\D8\A8\FAv?\E3\9C4?\F9\DC\BB\C7\C7\0BO\1D\8AQ\E0K\CD\B4Y1\C8\9F~\C9\D9xsd\EA\C5\AC\834\D3\EB\C3\C5\81\A0\FF\FA\13c\EB\17\0D\DDQ\B7\F0\DAI\D3\16U&)\D4h\9E+\16\BEX}G\A1\FC\8F\F8\B8\D1z\D01\CEE\CB:\8F\95\16\04(\AF\D7\FB\CA\BBK@~", align 8

define void @block_sums(ptr %rows, i32 %count, i64 %bytes, ptr %sums) {
entry:
  %sub.i = add i64 %bytes, 4398046511103
  %div1.i = lshr i64 %sub.i, 10
  %conv.i = trunc i64 %div1.i to i32
  %mul = shl i32 %count, 3
  %mul2 = mul i32 %mul, %conv.i
  %cmp40.not = icmp eq i32 %mul2, 0
  br i1 %cmp40.not, label %for.cond.cleanup, label %for.body.lr.ph

for.body.lr.ph:
  %div537 = lshr i64 %bytes, 3
  %wide.trip.count = zext i32 %mul2 to i64
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %indvars.iv = phi i64 [ 0, %for.body.lr.ph ], [ %indvars.iv.next, %for.body ]
  %0 = trunc i64 %indvars.iv to i32
  %div36 = lshr i32 %0, 3
  %rem = urem i32 %div36, %conv.i
  %div4 = udiv i32 %div36, %conv.i
  %conv = zext i32 %div4 to i64
  %mul6 = mul i64 %div537, %conv
  %add.ptr = getelementptr i64, ptr %rows, i64 %mul6
  %conv7 = zext i32 %rem to i64
  %add.ptr9.idx = shl i64 %conv7, 10
  %add.ptr9 = getelementptr i8, ptr %add.ptr, i64 %add.ptr9.idx
  %rem17 = and i64 %indvars.iv, 7
  %idxprom.i = and i64 %indvars.iv, 7
  %xor1.i = xor i64 %rem17, 1
  %arrayidx.i = getelementptr i64, ptr %add.ptr9, i64 %idxprom.i
  %1 = load i64, ptr %arrayidx.i, align 8
  %arrayidx.i.i = getelementptr i64, ptr @SECRET, i64 %idxprom.i
  %2 = load i64, ptr %arrayidx.i.i, align 8
  %xor.i = xor i64 %2, %1
  %arrayidx3.i = getelementptr i64, ptr %add.ptr9, i64 %xor1.i
  %3 = load i64, ptr %arrayidx3.i, align 8
  %and.i = and i64 %xor.i, 4294967295
  %shr.i = lshr i64 %xor.i, 32
  %mul4.i = mul i64 %and.i, %shr.i
  %add = add i64 %3, %mul4.i
  %add.ptr16.1 = getelementptr i8, ptr %add.ptr9, i64 64
  %arrayidx.i.1 = getelementptr i64, ptr %add.ptr16.1, i64 %idxprom.i
  %4 = load i64, ptr %arrayidx.i.1, align 8
  %gep = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 8), i64 %idxprom.i
  %5 = load i64, ptr %gep, align 8
  %xor.i.1 = xor i64 %5, %4
  %arrayidx3.i.1 = getelementptr i64, ptr %add.ptr16.1, i64 %xor1.i
  %6 = load i64, ptr %arrayidx3.i.1, align 8
  %and.i.1 = and i64 %xor.i.1, 4294967295
  %shr.i.1 = lshr i64 %xor.i.1, 32
  %mul4.i.1 = mul i64 %and.i.1, %shr.i.1
  %add5.i.1 = add i64 %6, %add
  %add.1 = add i64 %add5.i.1, %mul4.i.1
  %add.ptr16.2 = getelementptr i8, ptr %add.ptr9, i64 128
  %arrayidx.i.2 = getelementptr i64, ptr %add.ptr16.2, i64 %idxprom.i
  %7 = load i64, ptr %arrayidx.i.2, align 8
  %gep46 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 16), i64 %idxprom.i
  %8 = load i64, ptr %gep46, align 8
  %xor.i.2 = xor i64 %8, %7
  %arrayidx3.i.2 = getelementptr i64, ptr %add.ptr16.2, i64 %xor1.i
  %9 = load i64, ptr %arrayidx3.i.2, align 8
  %and.i.2 = and i64 %xor.i.2, 4294967295
  %shr.i.2 = lshr i64 %xor.i.2, 32
  %mul4.i.2 = mul i64 %and.i.2, %shr.i.2
  %add5.i.2 = add i64 %9, %add.1
  %add.2 = add i64 %add5.i.2, %mul4.i.2
  %add.ptr16.3 = getelementptr i8, ptr %add.ptr9, i64 192
  %arrayidx.i.3 = getelementptr i64, ptr %add.ptr16.3, i64 %idxprom.i
  %10 = load i64, ptr %arrayidx.i.3, align 8
  %gep47 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 24), i64 %idxprom.i
  %11 = load i64, ptr %gep47, align 8
  %xor.i.3 = xor i64 %11, %10
  %arrayidx3.i.3 = getelementptr i64, ptr %add.ptr16.3, i64 %xor1.i
  %12 = load i64, ptr %arrayidx3.i.3, align 8
  %and.i.3 = and i64 %xor.i.3, 4294967295
  %shr.i.3 = lshr i64 %xor.i.3, 32
  %mul4.i.3 = mul i64 %and.i.3, %shr.i.3
  %add5.i.3 = add i64 %12, %add.2
  %add.3 = add i64 %add5.i.3, %mul4.i.3
  %add.ptr16.4 = getelementptr i8, ptr %add.ptr9, i64 256
  %arrayidx.i.4 = getelementptr i64, ptr %add.ptr16.4, i64 %idxprom.i
  %13 = load i64, ptr %arrayidx.i.4, align 8
  %gep48 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 32), i64 %idxprom.i
  %14 = load i64, ptr %gep48, align 8
  %xor.i.4 = xor i64 %14, %13
  %arrayidx3.i.4 = getelementptr i64, ptr %add.ptr16.4, i64 %xor1.i
  %15 = load i64, ptr %arrayidx3.i.4, align 8
  %and.i.4 = and i64 %xor.i.4, 4294967295
  %shr.i.4 = lshr i64 %xor.i.4, 32
  %mul4.i.4 = mul i64 %and.i.4, %shr.i.4
  %add5.i.4 = add i64 %15, %add.3
  %add.4 = add i64 %add5.i.4, %mul4.i.4
  %add.ptr16.5 = getelementptr i8, ptr %add.ptr9, i64 320
  %arrayidx.i.5 = getelementptr i64, ptr %add.ptr16.5, i64 %idxprom.i
  %16 = load i64, ptr %arrayidx.i.5, align 8
  %gep49 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 40), i64 %idxprom.i
  %17 = load i64, ptr %gep49, align 8
  %xor.i.5 = xor i64 %17, %16
  %arrayidx3.i.5 = getelementptr i64, ptr %add.ptr16.5, i64 %xor1.i
  %18 = load i64, ptr %arrayidx3.i.5, align 8
  %and.i.5 = and i64 %xor.i.5, 4294967295
  %shr.i.5 = lshr i64 %xor.i.5, 32
  %mul4.i.5 = mul i64 %and.i.5, %shr.i.5
  %add5.i.5 = add i64 %18, %add.4
  %add.5 = add i64 %add5.i.5, %mul4.i.5
  %add.ptr16.6 = getelementptr i8, ptr %add.ptr9, i64 384
  %arrayidx.i.6 = getelementptr i64, ptr %add.ptr16.6, i64 %idxprom.i
  %19 = load i64, ptr %arrayidx.i.6, align 8
  %gep50 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 48), i64 %idxprom.i
  %20 = load i64, ptr %gep50, align 8
  %xor.i.6 = xor i64 %20, %19
  %arrayidx3.i.6 = getelementptr i64, ptr %add.ptr16.6, i64 %xor1.i
  %21 = load i64, ptr %arrayidx3.i.6, align 8
  %and.i.6 = and i64 %xor.i.6, 4294967295
  %shr.i.6 = lshr i64 %xor.i.6, 32
  %mul4.i.6 = mul i64 %and.i.6, %shr.i.6
  %add5.i.6 = add i64 %21, %add.5
  %add.6 = add i64 %add5.i.6, %mul4.i.6
  %add.ptr16.7 = getelementptr i8, ptr %add.ptr9, i64 448
  %arrayidx.i.7 = getelementptr i64, ptr %add.ptr16.7, i64 %idxprom.i
  %22 = load i64, ptr %arrayidx.i.7, align 8
  %gep51 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 56), i64 %idxprom.i
  %23 = load i64, ptr %gep51, align 8
  %xor.i.7 = xor i64 %23, %22
  %arrayidx3.i.7 = getelementptr i64, ptr %add.ptr16.7, i64 %xor1.i
  %24 = load i64, ptr %arrayidx3.i.7, align 8
  %and.i.7 = and i64 %xor.i.7, 4294967295
  %shr.i.7 = lshr i64 %xor.i.7, 32
  %mul4.i.7 = mul i64 %and.i.7, %shr.i.7
  %add5.i.7 = add i64 %24, %add.6
  %add.7 = add i64 %add5.i.7, %mul4.i.7
  %add.ptr16.8 = getelementptr i8, ptr %add.ptr9, i64 512
  %arrayidx.i.8 = getelementptr i64, ptr %add.ptr16.8, i64 %idxprom.i
  %25 = load i64, ptr %arrayidx.i.8, align 8
  %26 = or i64 %idxprom.i, 8
  %arrayidx.i.i.8 = getelementptr i64, ptr @SECRET, i64 %26
  %27 = load i64, ptr %arrayidx.i.i.8, align 8
  %xor.i.8 = xor i64 %27, %25
  %arrayidx3.i.8 = getelementptr i64, ptr %add.ptr16.8, i64 %xor1.i
  %28 = load i64, ptr %arrayidx3.i.8, align 8
  %and.i.8 = and i64 %xor.i.8, 4294967295
  %shr.i.8 = lshr i64 %xor.i.8, 32
  %mul4.i.8 = mul i64 %and.i.8, %shr.i.8
  %add5.i.8 = add i64 %28, %add.7
  %add.8 = add i64 %add5.i.8, %mul4.i.8
  %add.ptr16.9 = getelementptr i8, ptr %add.ptr9, i64 576
  %arrayidx.i.9 = getelementptr i64, ptr %add.ptr16.9, i64 %idxprom.i
  %29 = load i64, ptr %arrayidx.i.9, align 8
  %gep52 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 72), i64 %idxprom.i
  %30 = load i64, ptr %gep52, align 8
  %xor.i.9 = xor i64 %30, %29
  %arrayidx3.i.9 = getelementptr i64, ptr %add.ptr16.9, i64 %xor1.i
  %31 = load i64, ptr %arrayidx3.i.9, align 8
  %and.i.9 = and i64 %xor.i.9, 4294967295
  %shr.i.9 = lshr i64 %xor.i.9, 32
  %mul4.i.9 = mul i64 %and.i.9, %shr.i.9
  %add5.i.9 = add i64 %31, %add.8
  %add.9 = add i64 %add5.i.9, %mul4.i.9
  %add.ptr16.10 = getelementptr i8, ptr %add.ptr9, i64 640
  %arrayidx.i.10 = getelementptr i64, ptr %add.ptr16.10, i64 %idxprom.i
  %32 = load i64, ptr %arrayidx.i.10, align 8
  %gep53 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 80), i64 %idxprom.i
  %33 = load i64, ptr %gep53, align 8
  %xor.i.10 = xor i64 %33, %32
  %arrayidx3.i.10 = getelementptr i64, ptr %add.ptr16.10, i64 %xor1.i
  %34 = load i64, ptr %arrayidx3.i.10, align 8
  %and.i.10 = and i64 %xor.i.10, 4294967295
  %shr.i.10 = lshr i64 %xor.i.10, 32
  %mul4.i.10 = mul i64 %and.i.10, %shr.i.10
  %add5.i.10 = add i64 %34, %add.9
  %add.10 = add i64 %add5.i.10, %mul4.i.10
  %add.ptr16.11 = getelementptr i8, ptr %add.ptr9, i64 704
  %arrayidx.i.11 = getelementptr i64, ptr %add.ptr16.11, i64 %idxprom.i
  %35 = load i64, ptr %arrayidx.i.11, align 8
  %gep54 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 88), i64 %idxprom.i
  %36 = load i64, ptr %gep54, align 8
  %xor.i.11 = xor i64 %36, %35
  %arrayidx3.i.11 = getelementptr i64, ptr %add.ptr16.11, i64 %xor1.i
  %37 = load i64, ptr %arrayidx3.i.11, align 8
  %and.i.11 = and i64 %xor.i.11, 4294967295
  %shr.i.11 = lshr i64 %xor.i.11, 32
  %mul4.i.11 = mul i64 %and.i.11, %shr.i.11
  %add5.i.11 = add i64 %37, %add.10
  %add.11 = add i64 %add5.i.11, %mul4.i.11
  %add.ptr16.12 = getelementptr i8, ptr %add.ptr9, i64 768
  %arrayidx.i.12 = getelementptr i64, ptr %add.ptr16.12, i64 %idxprom.i
  %38 = load i64, ptr %arrayidx.i.12, align 8
  %gep55 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 96), i64 %idxprom.i
  %39 = load i64, ptr %gep55, align 8
  %xor.i.12 = xor i64 %39, %38
  %arrayidx3.i.12 = getelementptr i64, ptr %add.ptr16.12, i64 %xor1.i
  %40 = load i64, ptr %arrayidx3.i.12, align 8
  %and.i.12 = and i64 %xor.i.12, 4294967295
  %shr.i.12 = lshr i64 %xor.i.12, 32
  %mul4.i.12 = mul i64 %and.i.12, %shr.i.12
  %add5.i.12 = add i64 %40, %add.11
  %add.12 = add i64 %add5.i.12, %mul4.i.12
  %add.ptr16.13 = getelementptr i8, ptr %add.ptr9, i64 832
  %arrayidx.i.13 = getelementptr i64, ptr %add.ptr16.13, i64 %idxprom.i
  %41 = load i64, ptr %arrayidx.i.13, align 8
  %gep56 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 104), i64 %idxprom.i
  %42 = load i64, ptr %gep56, align 8
  %xor.i.13 = xor i64 %42, %41
  %arrayidx3.i.13 = getelementptr i64, ptr %add.ptr16.13, i64 %xor1.i
  %43 = load i64, ptr %arrayidx3.i.13, align 8
  %and.i.13 = and i64 %xor.i.13, 4294967295
  %shr.i.13 = lshr i64 %xor.i.13, 32
  %mul4.i.13 = mul i64 %and.i.13, %shr.i.13
  %add5.i.13 = add i64 %43, %add.12
  %add.13 = add i64 %add5.i.13, %mul4.i.13
  %add.ptr16.14 = getelementptr i8, ptr %add.ptr9, i64 896
  %arrayidx.i.14 = getelementptr i64, ptr %add.ptr16.14, i64 %idxprom.i
  %44 = load i64, ptr %arrayidx.i.14, align 8
  %gep57 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 112), i64 %idxprom.i
  %45 = load i64, ptr %gep57, align 8
  %xor.i.14 = xor i64 %45, %44
  %arrayidx3.i.14 = getelementptr i64, ptr %add.ptr16.14, i64 %xor1.i
  %46 = load i64, ptr %arrayidx3.i.14, align 8
  %and.i.14 = and i64 %xor.i.14, 4294967295
  %shr.i.14 = lshr i64 %xor.i.14, 32
  %mul4.i.14 = mul i64 %and.i.14, %shr.i.14
  %add5.i.14 = add i64 %46, %add.13
  %add.14 = add i64 %add5.i.14, %mul4.i.14
  %add.ptr16.15 = getelementptr i8, ptr %add.ptr9, i64 960
  %arrayidx.i.15 = getelementptr i64, ptr %add.ptr16.15, i64 %idxprom.i
  %47 = load i64, ptr %arrayidx.i.15, align 8
  %gep58 = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 120), i64 %idxprom.i
  %48 = load i64, ptr %gep58, align 8
  %xor.i.15 = xor i64 %48, %47
  %arrayidx3.i.15 = getelementptr i64, ptr %add.ptr16.15, i64 %xor1.i
  %49 = load i64, ptr %arrayidx3.i.15, align 8
  %and.i.15 = and i64 %xor.i.15, 4294967295
  %shr.i.15 = lshr i64 %xor.i.15, 32
  %mul4.i.15 = mul i64 %and.i.15, %shr.i.15
  %add5.i.15 = add i64 %49, %add.14
  %add.15 = add i64 %add5.i.15, %mul4.i.15
  %arrayidx = getelementptr i64, ptr %sums, i64 %indvars.iv
  store i64 %add.15, ptr %arrayidx, align 8
  %indvars.iv.next = add i64 %indvars.iv, 1
  %exitcond.not = icmp eq i64 %indvars.iv.next, %wide.trip.count
  br i1 %exitcond.not, label %for.cond.cleanup, label %for.body
}

define void @row_sums(ptr %rows, i32 %count, i64 %bytes, ptr %sums, ptr %totals) {
entry:
  %mul = shl i32 %count, 3
  %cmp107.not = icmp eq i32 %mul, 0
  br i1 %cmp107.not, label %for.cond.cleanup, label %for.body.lr.ph

for.body.lr.ph:
  %sub.i = add i64 %bytes, 4398046511103
  %div1.i = lshr i64 %sub.i, 10
  %conv.i = trunc i64 %div1.i to i32
  %conv2 = shl i64 %div1.i, 6
  %mul3 = and i64 %conv2, 274877906880
  %cmp9100.not = icmp eq i32 %conv.i, 0
  %div2077 = lshr i64 %bytes, 3
  %div2378 = lshr i64 %bytes, 6
  %0 = trunc i64 %div2378 to i32
  %conv24 = add i32 %0, -1
  %mul25 = shl i32 %conv.i, 4
  %cmp27103 = icmp ult i32 %mul25, %conv24
  %conv41 = zext i32 %conv24 to i64
  %add.ptr43.idx = shl i64 %conv41, 6
  %1 = trunc i64 %div1.i to i32
  %2 = shl i64 %div1.i, 4
  %3 = and i64 %2, 4294967280
  %4 = shl i32 %1, 4
  %5 = add i32 %4, %0
  %6 = xor i32 %mul25, -1
  %7 = add i32 %5, %6
  %wide.trip.count116 = zext i32 %mul to i64
  %wide.trip.count = and i64 %div1.i, 4294967295
  %8 = add i64 %wide.trip.count, -1
  %xtraiter = and i64 %div1.i, 15
  %9 = icmp ult i64 %8, 15
  %unroll_iter = sub i64 %wide.trip.count, %xtraiter
  %lcmp.mod.not = icmp eq i64 %xtraiter, 0
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %indvars.iv113 = phi i64 [ 0, %for.body.lr.ph ], [ %indvars.iv.next114, %for.cond.cleanup29 ]
  %10 = trunc i64 %indvars.iv113 to i32
  %rem = and i32 %10, 7
  %div76 = lshr i64 %indvars.iv113, 3
  %conv = and i64 %div76, 536870911
  %add.ptr.idx = mul i64 %mul3, %conv
  %add.ptr = getelementptr i8, ptr %sums, i64 %add.ptr.idx
  %idx.ext = and i64 %indvars.iv113, 7
  %add.ptr5 = getelementptr i64, ptr %add.ptr, i64 %idx.ext
  %arrayidx = getelementptr [8 x i64], ptr @FIRST_SUMS, i64 0, i64 %idx.ext
  %11 = load i64, ptr %arrayidx, align 8
  %add = or i32 %rem, 16
  %idxprom.i = zext i32 %add to i64
  %arrayidx.i = getelementptr i64, ptr @SECRET, i64 %idxprom.i
  %12 = load i64, ptr %arrayidx.i, align 8
  br i1 %cmp9100.not, label %for.cond.cleanup11, label %for.body12.preheader

for.body12.preheader:
  br i1 %9, label %for.cond.cleanup11.loopexit.unr-lcssa, label %for.body12

for.cond.cleanup11.loopexit.unr-lcssa:
  %mul18.lcssa.ph = phi i64 [ poison, %for.body12.preheader ], [ %mul18.15, %for.body12 ]
  %indvars.iv.unr = phi i64 [ 0, %for.body12.preheader ], [ %indvars.iv.next.15, %for.body12 ]
  %total.0101.unr = phi i64 [ %11, %for.body12.preheader ], [ %mul18.15, %for.body12 ]
  br i1 %lcmp.mod.not, label %for.cond.cleanup11, label %for.body12.epil

for.body12.epil:
  %indvars.iv.epil = phi i64 [ %indvars.iv.next.epil, %for.body12.epil ], [ %indvars.iv.unr, %for.cond.cleanup11.loopexit.unr-lcssa ]
  %total.0101.epil = phi i64 [ %mul18.epil, %for.body12.epil ], [ %total.0101.unr, %for.cond.cleanup11.loopexit.unr-lcssa ]
  %epil.iter = phi i64 [ %epil.iter.next, %for.body12.epil ], [ 0, %for.cond.cleanup11.loopexit.unr-lcssa ]
  %mul13.epil = shl i64 %indvars.iv.epil, 3
  %idxprom14.epil = and i64 %mul13.epil, 4294967288
  %arrayidx15.epil = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.epil
  %13 = load i64, ptr %arrayidx15.epil, align 8
  %add16.epil = add i64 %13, %total.0101.epil
  %shr.epil = lshr i64 %add16.epil, 47
  %14 = xor i64 %12, %shr.epil
  %xor17.epil = xor i64 %14, %add16.epil
  %mul18.epil = mul i64 %xor17.epil, 2654435761
  %indvars.iv.next.epil = add i64 %indvars.iv.epil, 1
  %epil.iter.next = add i64 %epil.iter, 1
  %epil.iter.cmp.not = icmp eq i64 %epil.iter.next, %xtraiter
  br i1 %epil.iter.cmp.not, label %for.cond.cleanup11, label %for.body12.epil

for.cond.cleanup11:
  %total.0.lcssa = phi i64 [ %11, %for.body ], [ %mul18.lcssa.ph, %for.cond.cleanup11.loopexit.unr-lcssa ], [ %mul18.epil, %for.body12.epil ]
  %mul21 = mul i64 %div2077, %conv
  %add.ptr22 = getelementptr i64, ptr %rows, i64 %mul21
  %xor1.i93 = xor i32 %rem, 1
  %idxprom2.i94 = zext i32 %xor1.i93 to i64
  br i1 %cmp27103, label %for.body30, label %for.cond.cleanup29

for.body12:
  %indvars.iv = phi i64 [ %indvars.iv.next.15, %for.body12 ], [ 0, %for.body12.preheader ]
  %total.0101 = phi i64 [ %mul18.15, %for.body12 ], [ %11, %for.body12.preheader ]
  %niter = phi i64 [ %niter.next.15, %for.body12 ], [ 0, %for.body12.preheader ]
  %mul13 = shl i64 %indvars.iv, 3
  %idxprom14 = and i64 %mul13, 4294967168
  %arrayidx15 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14
  %15 = load i64, ptr %arrayidx15, align 8
  %add16 = add i64 %15, %total.0101
  %shr = lshr i64 %add16, 47
  %16 = xor i64 %12, %shr
  %xor17 = xor i64 %16, %add16
  %mul18 = mul i64 %xor17, 2654435761
  %indvars.iv.next = shl i64 %indvars.iv, 3
  %mul13.1 = and i64 %indvars.iv.next, 4294967168
  %idxprom14.1 = or i64 %mul13.1, 8
  %arrayidx15.1 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.1
  %17 = load i64, ptr %arrayidx15.1, align 8
  %add16.1 = add i64 %17, %mul18
  %shr.1 = lshr i64 %add16.1, 47
  %18 = xor i64 %12, %shr.1
  %xor17.1 = xor i64 %18, %add16.1
  %mul18.1 = mul i64 %xor17.1, 2654435761
  %indvars.iv.next.1 = shl i64 %indvars.iv, 3
  %mul13.2 = and i64 %indvars.iv.next.1, 4294967168
  %idxprom14.2 = or i64 %mul13.2, 16
  %arrayidx15.2 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.2
  %19 = load i64, ptr %arrayidx15.2, align 8
  %add16.2 = add i64 %19, %mul18.1
  %shr.2 = lshr i64 %add16.2, 47
  %20 = xor i64 %12, %shr.2
  %xor17.2 = xor i64 %20, %add16.2
  %mul18.2 = mul i64 %xor17.2, 2654435761
  %indvars.iv.next.2 = shl i64 %indvars.iv, 3
  %mul13.3 = and i64 %indvars.iv.next.2, 4294967168
  %idxprom14.3 = or i64 %mul13.3, 24
  %arrayidx15.3 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.3
  %21 = load i64, ptr %arrayidx15.3, align 8
  %add16.3 = add i64 %21, %mul18.2
  %shr.3 = lshr i64 %add16.3, 47
  %22 = xor i64 %12, %shr.3
  %xor17.3 = xor i64 %22, %add16.3
  %mul18.3 = mul i64 %xor17.3, 2654435761
  %indvars.iv.next.3 = shl i64 %indvars.iv, 3
  %mul13.4 = and i64 %indvars.iv.next.3, 4294967168
  %idxprom14.4 = or i64 %mul13.4, 32
  %arrayidx15.4 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.4
  %23 = load i64, ptr %arrayidx15.4, align 8
  %add16.4 = add i64 %23, %mul18.3
  %shr.4 = lshr i64 %add16.4, 47
  %24 = xor i64 %12, %shr.4
  %xor17.4 = xor i64 %24, %add16.4
  %mul18.4 = mul i64 %xor17.4, 2654435761
  %indvars.iv.next.4 = shl i64 %indvars.iv, 3
  %mul13.5 = and i64 %indvars.iv.next.4, 4294967168
  %idxprom14.5 = or i64 %mul13.5, 40
  %arrayidx15.5 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.5
  %25 = load i64, ptr %arrayidx15.5, align 8
  %add16.5 = add i64 %25, %mul18.4
  %shr.5 = lshr i64 %add16.5, 47
  %26 = xor i64 %12, %shr.5
  %xor17.5 = xor i64 %26, %add16.5
  %mul18.5 = mul i64 %xor17.5, 2654435761
  %indvars.iv.next.5 = shl i64 %indvars.iv, 3
  %mul13.6 = and i64 %indvars.iv.next.5, 4294967168
  %idxprom14.6 = or i64 %mul13.6, 48
  %arrayidx15.6 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.6
  %27 = load i64, ptr %arrayidx15.6, align 8
  %add16.6 = add i64 %27, %mul18.5
  %shr.6 = lshr i64 %add16.6, 47
  %28 = xor i64 %12, %shr.6
  %xor17.6 = xor i64 %28, %add16.6
  %mul18.6 = mul i64 %xor17.6, 2654435761
  %indvars.iv.next.6 = shl i64 %indvars.iv, 3
  %mul13.7 = and i64 %indvars.iv.next.6, 4294967168
  %idxprom14.7 = or i64 %mul13.7, 56
  %arrayidx15.7 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.7
  %29 = load i64, ptr %arrayidx15.7, align 8
  %add16.7 = add i64 %29, %mul18.6
  %shr.7 = lshr i64 %add16.7, 47
  %30 = xor i64 %12, %shr.7
  %xor17.7 = xor i64 %30, %add16.7
  %mul18.7 = mul i64 %xor17.7, 2654435761
  %indvars.iv.next.7 = shl i64 %indvars.iv, 3
  %mul13.8 = and i64 %indvars.iv.next.7, 4294967168
  %idxprom14.8 = or i64 %mul13.8, 64
  %arrayidx15.8 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.8
  %31 = load i64, ptr %arrayidx15.8, align 8
  %add16.8 = add i64 %31, %mul18.7
  %shr.8 = lshr i64 %add16.8, 47
  %32 = xor i64 %12, %shr.8
  %xor17.8 = xor i64 %32, %add16.8
  %mul18.8 = mul i64 %xor17.8, 2654435761
  %indvars.iv.next.8 = shl i64 %indvars.iv, 3
  %mul13.9 = and i64 %indvars.iv.next.8, 4294967168
  %idxprom14.9 = or i64 %mul13.9, 72
  %arrayidx15.9 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.9
  %33 = load i64, ptr %arrayidx15.9, align 8
  %add16.9 = add i64 %33, %mul18.8
  %shr.9 = lshr i64 %add16.9, 47
  %34 = xor i64 %12, %shr.9
  %xor17.9 = xor i64 %34, %add16.9
  %mul18.9 = mul i64 %xor17.9, 2654435761
  %indvars.iv.next.9 = shl i64 %indvars.iv, 3
  %mul13.10 = and i64 %indvars.iv.next.9, 4294967168
  %idxprom14.10 = or i64 %mul13.10, 80
  %arrayidx15.10 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.10
  %35 = load i64, ptr %arrayidx15.10, align 8
  %add16.10 = add i64 %35, %mul18.9
  %shr.10 = lshr i64 %add16.10, 47
  %36 = xor i64 %12, %shr.10
  %xor17.10 = xor i64 %36, %add16.10
  %mul18.10 = mul i64 %xor17.10, 2654435761
  %indvars.iv.next.10 = shl i64 %indvars.iv, 3
  %mul13.11 = and i64 %indvars.iv.next.10, 4294967168
  %idxprom14.11 = or i64 %mul13.11, 88
  %arrayidx15.11 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.11
  %37 = load i64, ptr %arrayidx15.11, align 8
  %add16.11 = add i64 %37, %mul18.10
  %shr.11 = lshr i64 %add16.11, 47
  %38 = xor i64 %12, %shr.11
  %xor17.11 = xor i64 %38, %add16.11
  %mul18.11 = mul i64 %xor17.11, 2654435761
  %indvars.iv.next.11 = shl i64 %indvars.iv, 3
  %mul13.12 = and i64 %indvars.iv.next.11, 4294967168
  %idxprom14.12 = or i64 %mul13.12, 96
  %arrayidx15.12 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.12
  %39 = load i64, ptr %arrayidx15.12, align 8
  %add16.12 = add i64 %39, %mul18.11
  %shr.12 = lshr i64 %add16.12, 47
  %40 = xor i64 %12, %shr.12
  %xor17.12 = xor i64 %40, %add16.12
  %mul18.12 = mul i64 %xor17.12, 2654435761
  %indvars.iv.next.12 = shl i64 %indvars.iv, 3
  %mul13.13 = and i64 %indvars.iv.next.12, 4294967168
  %idxprom14.13 = or i64 %mul13.13, 104
  %arrayidx15.13 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.13
  %41 = load i64, ptr %arrayidx15.13, align 8
  %add16.13 = add i64 %41, %mul18.12
  %shr.13 = lshr i64 %add16.13, 47
  %42 = xor i64 %12, %shr.13
  %xor17.13 = xor i64 %42, %add16.13
  %mul18.13 = mul i64 %xor17.13, 2654435761
  %indvars.iv.next.13 = shl i64 %indvars.iv, 3
  %mul13.14 = and i64 %indvars.iv.next.13, 4294967168
  %idxprom14.14 = or i64 %mul13.14, 112
  %arrayidx15.14 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.14
  %43 = load i64, ptr %arrayidx15.14, align 8
  %add16.14 = add i64 %43, %mul18.13
  %shr.14 = lshr i64 %add16.14, 47
  %44 = xor i64 %12, %shr.14
  %xor17.14 = xor i64 %44, %add16.14
  %mul18.14 = mul i64 %xor17.14, 2654435761
  %indvars.iv.next.14 = shl i64 %indvars.iv, 3
  %mul13.15 = and i64 %indvars.iv.next.14, 4294967168
  %idxprom14.15 = or i64 %mul13.15, 120
  %arrayidx15.15 = getelementptr i64, ptr %add.ptr5, i64 %idxprom14.15
  %45 = load i64, ptr %arrayidx15.15, align 8
  %add16.15 = add i64 %45, %mul18.14
  %shr.15 = lshr i64 %add16.15, 47
  %46 = xor i64 %12, %shr.15
  %xor17.15 = xor i64 %46, %add16.15
  %mul18.15 = mul i64 %xor17.15, 2654435761
  %indvars.iv.next.15 = add i64 %indvars.iv, 16
  %niter.next.15 = add i64 %niter, 16
  %niter.ncmp.15 = icmp eq i64 %niter.next.15, %unroll_iter
  br i1 %niter.ncmp.15, label %for.cond.cleanup11.loopexit.unr-lcssa, label %for.body12

for.cond.cleanup29:
  %total.1.lcssa = phi i64 [ %total.0.lcssa, %for.cond.cleanup11 ], [ %add37, %for.body30 ]
  %add.ptr43 = getelementptr i8, ptr %add.ptr22, i64 %add.ptr43.idx
  %arrayidx.i81 = getelementptr i64, ptr %add.ptr43, i64 %idx.ext
  %47 = load i64, ptr %arrayidx.i81, align 8
  %gep = getelementptr i64, ptr getelementptr (i8, ptr @SECRET, i64 120), i64 %idx.ext
  %48 = load i64, ptr %gep, align 8
  %or.i.i = tail call i64 @llvm.fshl.i64(i64 %12, i64 %48, i64 56)
  %xor.i = xor i64 %or.i.i, %47
  %arrayidx3.i82 = getelementptr i64, ptr %add.ptr43, i64 %idxprom2.i94
  %49 = load i64, ptr %arrayidx3.i82, align 8
  %and.i = and i64 %xor.i, 4294967295
  %shr.i = lshr i64 %xor.i, 32
  %mul4.i = mul i64 %and.i, %shr.i
  %add5.i = add i64 %49, %total.1.lcssa
  %add45 = add i64 %add5.i, %mul4.i
  %arrayidx47 = getelementptr i64, ptr %totals, i64 %indvars.iv113
  store i64 %add45, ptr %arrayidx47, align 8
  %indvars.iv.next114 = add i64 %indvars.iv113, 1
  %exitcond117.not = icmp eq i64 %indvars.iv.next114, %wide.trip.count116
  br i1 %exitcond117.not, label %for.cond.cleanup, label %for.body

for.body30:
  %indvars.iv110 = phi i64 [ %indvars.iv.next111, %for.body30 ], [ %3, %for.cond.cleanup11 ]
  %total.1104 = phi i64 [ %add37, %for.body30 ], [ %total.0.lcssa, %for.cond.cleanup11 ]
  %add.ptr33.idx = shl i64 %indvars.iv110, 6
  %add.ptr33 = getelementptr i8, ptr %add.ptr22, i64 %add.ptr33.idx
  %50 = trunc i64 %indvars.iv110 to i32
  %mul35 = and i32 %50, 15
  %arrayidx.i84 = getelementptr i64, ptr %add.ptr33, i64 %idx.ext
  %51 = load i64, ptr %arrayidx.i84, align 8
  %div11.i.i85 = add i32 %mul35, %rem
  %idxprom.i.i86 = zext i32 %div11.i.i85 to i64
  %arrayidx.i.i87 = getelementptr i64, ptr @SECRET, i64 %idxprom.i.i86
  %52 = load i64, ptr %arrayidx.i.i87, align 8
  %xor.i92 = xor i64 %52, %51
  %arrayidx3.i95 = getelementptr i64, ptr %add.ptr33, i64 %idxprom2.i94
  %53 = load i64, ptr %arrayidx3.i95, align 8
  %and.i96 = and i64 %xor.i92, 4294967295
  %shr.i97 = lshr i64 %xor.i92, 32
  %mul4.i98 = mul i64 %and.i96, %shr.i97
  %add5.i99 = add i64 %53, %total.1104
  %add37 = add i64 %add5.i99, %mul4.i98
  %indvars.iv.next111 = add i64 %indvars.iv110, 1
  %lftr.wideiv = trunc i64 %indvars.iv.next111 to i32
  %exitcond112.not = icmp eq i32 %7, %lftr.wideiv
  br i1 %exitcond112.not, label %for.cond.cleanup29, label %for.body30
}

define void @merge_sums(ptr %totals, i32 %count, i64 %bytes, ptr %hashes) {
entry:
  %cmp56.not = icmp eq i32 %count, 0
  br i1 %cmp56.not, label %for.cond.cleanup, label %for.body.lr.ph

for.body.lr.ph:
  %mul = mul i64 %bytes, -7046029288634856825
  %wide.trip.count = zext i32 %count to i64
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %indvars.iv = phi i64 [ 0, %for.body.lr.ph ], [ %indvars.iv.next, %for.body ]
  %mul5 = shl i64 %indvars.iv, 3
  %idx.ext = and i64 %mul5, 4294967288
  %add.ptr = getelementptr i64, ptr %totals, i64 %idx.ext
  %0 = load i64, ptr %add.ptr, align 8
  %xor = xor i64 %0, 7914194659941938988
  %arrayidx10 = getelementptr i8, ptr %add.ptr, i64 8
  %1 = load i64, ptr %arrayidx10, align 8
  %xor15 = xor i64 %1, -6611157965513653271
  %conv = zext i64 %xor to i128
  %conv16 = zext i64 %xor15 to i128
  %mul17 = mul i128 %conv16, %conv
  %shr = lshr i128 %mul17, 64
  %xor2039 = xor i128 %shr, %mul17
  %xor20 = trunc i128 %xor2039 to i64
  %add21 = add i64 %mul, %xor20
  %add.ptr7.1 = getelementptr i8, ptr %add.ptr, i64 16
  %2 = load i64, ptr %add.ptr7.1, align 8
  %xor.1 = xor i64 %2, -1839215637059881052
  %arrayidx10.1 = getelementptr i8, ptr %add.ptr, i64 24
  %3 = load i64, ptr %arrayidx10.1, align 8
  %xor15.1 = xor i64 %3, -3433288310154277810
  %conv.1 = zext i64 %xor.1 to i128
  %conv16.1 = zext i64 %xor15.1 to i128
  %mul17.1 = mul i128 %conv16.1, %conv.1
  %shr.1 = lshr i128 %mul17.1, 64
  %xor2039.1 = xor i128 %shr.1, %mul17.1
  %xor20.1 = trunc i128 %xor2039.1 to i64
  %add21.1 = add i64 %add21, %xor20.1
  %add.ptr7.2 = getelementptr i8, ptr %add.ptr, i64 32
  %4 = load i64, ptr %add.ptr7.2, align 8
  %xor.2 = xor i64 %4, 5046485836271438973
  %arrayidx10.2 = getelementptr i8, ptr %add.ptr, i64 40
  %5 = load i64, ptr %arrayidx10.2, align 8
  %xor15.2 = xor i64 %5, -8055285457383852172
  %conv.2 = zext i64 %xor.2 to i128
  %conv16.2 = zext i64 %xor15.2 to i128
  %mul17.2 = mul i128 %conv16.2, %conv.2
  %shr.2 = lshr i128 %mul17.2, 64
  %xor2039.2 = xor i128 %shr.2, %mul17.2
  %xor20.2 = trunc i128 %xor2039.2 to i64
  %add21.2 = add i64 %add21.1, %xor20.2
  %add.ptr7.3 = getelementptr i8, ptr %add.ptr, i64 48
  %6 = load i64, ptr %add.ptr7.3, align 8
  %xor.3 = xor i64 %6, 5920048007935066598
  %arrayidx10.3 = getelementptr i8, ptr %add.ptr, i64 56
  %7 = load i64, ptr %arrayidx10.3, align 8
  %xor15.3 = xor i64 %7, 7336514198459093435
  %conv.3 = zext i64 %xor.3 to i128
  %conv16.3 = zext i64 %xor15.3 to i128
  %mul17.3 = mul i128 %conv16.3, %conv.3
  %shr.3 = lshr i128 %mul17.3, 64
  %xor2039.3 = xor i128 %shr.3, %mul17.3
  %xor20.3 = trunc i128 %xor2039.3 to i64
  %add21.3 = add i64 %add21.2, %xor20.3
  %shr.i = lshr i64 %add21.3, 37
  %xor.i = xor i64 %shr.i, %add21.3
  %mul.i = mul i64 %xor.i, 1609587791953885689
  %shr1.i = lshr i64 %mul.i, 32
  %xor2.i = xor i64 %shr1.i, %mul.i
  %arrayidx24 = getelementptr i64, ptr %hashes, i64 %indvars.iv
  store i64 %xor2.i, ptr %arrayidx24, align 8
  %indvars.iv.next = add i64 %indvars.iv, 1
  %exitcond.not = icmp eq i64 %indvars.iv.next, %wide.trip.count
  br i1 %exitcond.not, label %for.cond.cleanup, label %for.body
}

declare i64 @llvm.fshl.i64(i64, i64, i64)
