; clang 19, sha256 of the C 348b4c97fff1d8fe
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
  %sub.i = add i64 %bytes, 4398046511103
  %div1.i = lshr i64 %sub.i, 10
  %conv.i = trunc i64 %div1.i to i32
  %mul = shl i32 %count, 3
  %cmp200.not = icmp eq i32 %mul, 0
  br i1 %cmp200.not, label %for.cond.cleanup, label %for.body.lr.ph

for.body.lr.ph:
  %conv2 = shl i64 %div1.i, 6
  %mul3 = and i64 %conv2, 274877906880
  %cmp8 = icmp ugt i32 %conv.i, 15
  %cmp22.not186 = icmp ult i32 %conv.i, 32
  %div75151 = lshr i64 %bytes, 3
  %div78152 = lshr i64 %bytes, 6
  %0 = trunc i64 %div78152 to i32
  %conv79 = add i32 %0, -1
  %mul80 = shl i32 %conv.i, 4
  %cmp82196 = icmp ult i32 %mul80, %conv79
  %conv96 = zext i32 %conv79 to i64
  %add.ptr98.idx = shl i64 %conv96, 6
  %1 = and i64 %div1.i, 4294967295
  %2 = trunc i64 %div1.i to i32
  %3 = shl i64 %div1.i, 4
  %4 = and i64 %3, 4294967280
  %5 = shl i32 %2, 4
  %6 = add i32 %5, %0
  %7 = xor i32 %mul80, -1
  %8 = add i32 %6, %7
  %wide.trip.count221 = zext i32 %mul to i64
  br label %for.body

for.cond.cleanup:
  ret void

for.body:
  %indvars.iv218 = phi i64 [ 0, %for.body.lr.ph ], [ %indvars.iv.next219, %for.cond.cleanup84 ]
  %9 = trunc i64 %indvars.iv218 to i32
  %rem = and i32 %9, 7
  %div150 = lshr i64 %indvars.iv218, 3
  %conv = and i64 %div150, 536870911
  %add.ptr.idx = mul i64 %mul3, %conv
  %add.ptr = getelementptr i8, ptr %sums, i64 %add.ptr.idx
  %idx.ext = and i64 %indvars.iv218, 7
  %add.ptr5 = getelementptr i64, ptr %add.ptr, i64 %idx.ext
  %arrayidx = getelementptr [8 x i64], ptr @FIRST_SUMS, i64 0, i64 %idx.ext
  %10 = load i64, ptr %arrayidx, align 8
  %add = or i32 %rem, 16
  %idxprom.i = zext i32 %add to i64
  %arrayidx.i = getelementptr i64, ptr @SECRET, i64 %idxprom.i
  %11 = load i64, ptr %arrayidx.i, align 8
  br i1 %cmp8, label %if.then, label %if.end

if.then:
  %12 = load i64, ptr %add.ptr5, align 8
  %arrayidx17.1 = getelementptr i8, ptr %add.ptr5, i64 64
  %13 = load i64, ptr %arrayidx17.1, align 8
  %arrayidx17.2 = getelementptr i8, ptr %add.ptr5, i64 128
  %14 = load i64, ptr %arrayidx17.2, align 8
  %arrayidx17.3 = getelementptr i8, ptr %add.ptr5, i64 192
  %15 = load i64, ptr %arrayidx17.3, align 8
  %arrayidx17.4 = getelementptr i8, ptr %add.ptr5, i64 256
  %16 = load i64, ptr %arrayidx17.4, align 8
  %arrayidx17.5 = getelementptr i8, ptr %add.ptr5, i64 320
  %17 = load i64, ptr %arrayidx17.5, align 8
  %arrayidx17.6 = getelementptr i8, ptr %add.ptr5, i64 384
  %18 = load i64, ptr %arrayidx17.6, align 8
  %arrayidx17.7 = getelementptr i8, ptr %add.ptr5, i64 448
  %19 = load i64, ptr %arrayidx17.7, align 8
  %arrayidx17.8 = getelementptr i8, ptr %add.ptr5, i64 512
  %20 = load i64, ptr %arrayidx17.8, align 8
  %arrayidx17.9 = getelementptr i8, ptr %add.ptr5, i64 576
  %21 = load i64, ptr %arrayidx17.9, align 8
  %arrayidx17.10 = getelementptr i8, ptr %add.ptr5, i64 640
  %22 = load i64, ptr %arrayidx17.10, align 8
  %arrayidx17.11 = getelementptr i8, ptr %add.ptr5, i64 704
  %23 = load i64, ptr %arrayidx17.11, align 8
  %arrayidx17.12 = getelementptr i8, ptr %add.ptr5, i64 768
  %24 = load i64, ptr %arrayidx17.12, align 8
  %arrayidx17.13 = getelementptr i8, ptr %add.ptr5, i64 832
  %25 = load i64, ptr %arrayidx17.13, align 8
  %arrayidx17.14 = getelementptr i8, ptr %add.ptr5, i64 896
  %26 = load i64, ptr %arrayidx17.14, align 8
  %arrayidx17.15 = getelementptr i8, ptr %add.ptr5, i64 960
  %27 = load i64, ptr %arrayidx17.15, align 8
  br i1 %cmp22.not186, label %for.cond49.preheader, label %for.cond26.preheader

for.cond49.preheader.loopexit:
  %28 = trunc i64 %indvars.iv.next to i32
  br label %for.cond49.preheader

for.cond49.preheader:
  %ahead.sroa.62.0 = phi i64 [ %27, %if.then ], [ %91, %for.cond49.preheader.loopexit ]
  %ahead.sroa.58.0 = phi i64 [ %26, %if.then ], [ %88, %for.cond49.preheader.loopexit ]
  %ahead.sroa.54.0 = phi i64 [ %25, %if.then ], [ %85, %for.cond49.preheader.loopexit ]
  %ahead.sroa.50.0 = phi i64 [ %24, %if.then ], [ %82, %for.cond49.preheader.loopexit ]
  %ahead.sroa.46.0 = phi i64 [ %23, %if.then ], [ %79, %for.cond49.preheader.loopexit ]
  %ahead.sroa.42.0 = phi i64 [ %22, %if.then ], [ %76, %for.cond49.preheader.loopexit ]
  %ahead.sroa.38.0 = phi i64 [ %21, %if.then ], [ %73, %for.cond49.preheader.loopexit ]
  %ahead.sroa.34.0 = phi i64 [ %20, %if.then ], [ %70, %for.cond49.preheader.loopexit ]
  %ahead.sroa.30.0 = phi i64 [ %19, %if.then ], [ %67, %for.cond49.preheader.loopexit ]
  %ahead.sroa.26.0 = phi i64 [ %18, %if.then ], [ %64, %for.cond49.preheader.loopexit ]
  %ahead.sroa.22.0 = phi i64 [ %17, %if.then ], [ %61, %for.cond49.preheader.loopexit ]
  %ahead.sroa.18.0 = phi i64 [ %16, %if.then ], [ %58, %for.cond49.preheader.loopexit ]
  %ahead.sroa.14.0 = phi i64 [ %15, %if.then ], [ %55, %for.cond49.preheader.loopexit ]
  %ahead.sroa.10.0 = phi i64 [ %14, %if.then ], [ %52, %for.cond49.preheader.loopexit ]
  %ahead.sroa.6.0 = phi i64 [ %13, %if.then ], [ %49, %for.cond49.preheader.loopexit ]
  %ahead.sroa.0.0 = phi i64 [ %12, %if.then ], [ %46, %for.cond49.preheader.loopexit ]
  %total.0.lcssa = phi i64 [ %10, %if.then ], [ %mul.i154.15, %for.cond49.preheader.loopexit ]
  %block.0.lcssa = phi i32 [ 0, %if.then ], [ %28, %for.cond49.preheader.loopexit ]
  %add56 = add i64 %ahead.sroa.0.0, %total.0.lcssa
  %shr.i155 = lshr i64 %add56, 47
  %29 = xor i64 %11, %shr.i155
  %xor1.i156 = xor i64 %29, %add56
  %mul.i157 = mul i64 %xor1.i156, 2654435761
  %add56.1 = add i64 %ahead.sroa.6.0, %mul.i157
  %shr.i155.1 = lshr i64 %add56.1, 47
  %30 = xor i64 %11, %shr.i155.1
  %xor1.i156.1 = xor i64 %30, %add56.1
  %mul.i157.1 = mul i64 %xor1.i156.1, 2654435761
  %add56.2 = add i64 %ahead.sroa.10.0, %mul.i157.1
  %shr.i155.2 = lshr i64 %add56.2, 47
  %31 = xor i64 %11, %shr.i155.2
  %xor1.i156.2 = xor i64 %31, %add56.2
  %mul.i157.2 = mul i64 %xor1.i156.2, 2654435761
  %add56.3 = add i64 %ahead.sroa.14.0, %mul.i157.2
  %shr.i155.3 = lshr i64 %add56.3, 47
  %32 = xor i64 %11, %shr.i155.3
  %xor1.i156.3 = xor i64 %32, %add56.3
  %mul.i157.3 = mul i64 %xor1.i156.3, 2654435761
  %add56.4 = add i64 %ahead.sroa.18.0, %mul.i157.3
  %shr.i155.4 = lshr i64 %add56.4, 47
  %33 = xor i64 %11, %shr.i155.4
  %xor1.i156.4 = xor i64 %33, %add56.4
  %mul.i157.4 = mul i64 %xor1.i156.4, 2654435761
  %add56.5 = add i64 %ahead.sroa.22.0, %mul.i157.4
  %shr.i155.5 = lshr i64 %add56.5, 47
  %34 = xor i64 %11, %shr.i155.5
  %xor1.i156.5 = xor i64 %34, %add56.5
  %mul.i157.5 = mul i64 %xor1.i156.5, 2654435761
  %add56.6 = add i64 %ahead.sroa.26.0, %mul.i157.5
  %shr.i155.6 = lshr i64 %add56.6, 47
  %35 = xor i64 %11, %shr.i155.6
  %xor1.i156.6 = xor i64 %35, %add56.6
  %mul.i157.6 = mul i64 %xor1.i156.6, 2654435761
  %add56.7 = add i64 %ahead.sroa.30.0, %mul.i157.6
  %shr.i155.7 = lshr i64 %add56.7, 47
  %36 = xor i64 %11, %shr.i155.7
  %xor1.i156.7 = xor i64 %36, %add56.7
  %mul.i157.7 = mul i64 %xor1.i156.7, 2654435761
  %add56.8 = add i64 %ahead.sroa.34.0, %mul.i157.7
  %shr.i155.8 = lshr i64 %add56.8, 47
  %37 = xor i64 %11, %shr.i155.8
  %xor1.i156.8 = xor i64 %37, %add56.8
  %mul.i157.8 = mul i64 %xor1.i156.8, 2654435761
  %add56.9 = add i64 %ahead.sroa.38.0, %mul.i157.8
  %shr.i155.9 = lshr i64 %add56.9, 47
  %38 = xor i64 %11, %shr.i155.9
  %xor1.i156.9 = xor i64 %38, %add56.9
  %mul.i157.9 = mul i64 %xor1.i156.9, 2654435761
  %add56.10 = add i64 %ahead.sroa.42.0, %mul.i157.9
  %shr.i155.10 = lshr i64 %add56.10, 47
  %39 = xor i64 %11, %shr.i155.10
  %xor1.i156.10 = xor i64 %39, %add56.10
  %mul.i157.10 = mul i64 %xor1.i156.10, 2654435761
  %add56.11 = add i64 %ahead.sroa.46.0, %mul.i157.10
  %shr.i155.11 = lshr i64 %add56.11, 47
  %40 = xor i64 %11, %shr.i155.11
  %xor1.i156.11 = xor i64 %40, %add56.11
  %mul.i157.11 = mul i64 %xor1.i156.11, 2654435761
  %add56.12 = add i64 %ahead.sroa.50.0, %mul.i157.11
  %shr.i155.12 = lshr i64 %add56.12, 47
  %41 = xor i64 %11, %shr.i155.12
  %xor1.i156.12 = xor i64 %41, %add56.12
  %mul.i157.12 = mul i64 %xor1.i156.12, 2654435761
  %add56.13 = add i64 %ahead.sroa.54.0, %mul.i157.12
  %shr.i155.13 = lshr i64 %add56.13, 47
  %42 = xor i64 %11, %shr.i155.13
  %xor1.i156.13 = xor i64 %42, %add56.13
  %mul.i157.13 = mul i64 %xor1.i156.13, 2654435761
  %add56.14 = add i64 %ahead.sroa.58.0, %mul.i157.13
  %shr.i155.14 = lshr i64 %add56.14, 47
  %43 = xor i64 %11, %shr.i155.14
  %xor1.i156.14 = xor i64 %43, %add56.14
  %mul.i157.14 = mul i64 %xor1.i156.14, 2654435761
  %add56.15 = add i64 %ahead.sroa.62.0, %mul.i157.14
  %shr.i155.15 = lshr i64 %add56.15, 47
  %44 = xor i64 %11, %shr.i155.15
  %xor1.i156.15 = xor i64 %44, %add56.15
  %mul.i157.15 = mul i64 %xor1.i156.15, 2654435761
  %add61 = add i32 %block.0.lcssa, 16
  br label %if.end

for.cond26.preheader:
  %ahead.sroa.62.1 = phi i64 [ %91, %for.cond26.preheader ], [ %27, %if.then ]
  %ahead.sroa.58.1 = phi i64 [ %88, %for.cond26.preheader ], [ %26, %if.then ]
  %ahead.sroa.54.1 = phi i64 [ %85, %for.cond26.preheader ], [ %25, %if.then ]
  %ahead.sroa.50.1 = phi i64 [ %82, %for.cond26.preheader ], [ %24, %if.then ]
  %ahead.sroa.46.1 = phi i64 [ %79, %for.cond26.preheader ], [ %23, %if.then ]
  %ahead.sroa.42.1 = phi i64 [ %76, %for.cond26.preheader ], [ %22, %if.then ]
  %ahead.sroa.38.1 = phi i64 [ %73, %for.cond26.preheader ], [ %21, %if.then ]
  %ahead.sroa.34.1 = phi i64 [ %70, %for.cond26.preheader ], [ %20, %if.then ]
  %ahead.sroa.30.1 = phi i64 [ %67, %for.cond26.preheader ], [ %19, %if.then ]
  %ahead.sroa.26.1 = phi i64 [ %64, %for.cond26.preheader ], [ %18, %if.then ]
  %ahead.sroa.22.1 = phi i64 [ %61, %for.cond26.preheader ], [ %17, %if.then ]
  %ahead.sroa.18.1 = phi i64 [ %58, %for.cond26.preheader ], [ %16, %if.then ]
  %ahead.sroa.14.1 = phi i64 [ %55, %for.cond26.preheader ], [ %15, %if.then ]
  %ahead.sroa.10.1 = phi i64 [ %52, %for.cond26.preheader ], [ %14, %if.then ]
  %ahead.sroa.6.1 = phi i64 [ %49, %for.cond26.preheader ], [ %13, %if.then ]
  %ahead.sroa.0.1 = phi i64 [ %46, %for.cond26.preheader ], [ %12, %if.then ]
  %indvars.iv = phi i64 [ %indvars.iv.next, %for.cond26.preheader ], [ 0, %if.then ]
  %total.0187 = phi i64 [ %mul.i154.15, %for.cond26.preheader ], [ %10, %if.then ]
  %indvars.iv.next = add i64 %indvars.iv, 16
  %add33 = add i64 %ahead.sroa.0.1, %total.0187
  %shr.i = lshr i64 %add33, 47
  %45 = xor i64 %11, %shr.i
  %xor1.i = xor i64 %45, %add33
  %mul.i154 = mul i64 %xor1.i, 2654435761
  %mul37 = shl i64 %indvars.iv.next, 3
  %idxprom38 = and i64 %mul37, 4294967168
  %arrayidx39 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38
  %46 = load i64, ptr %arrayidx39, align 8
  %add33.1 = add i64 %ahead.sroa.6.1, %mul.i154
  %shr.i.1 = lshr i64 %add33.1, 47
  %47 = xor i64 %11, %shr.i.1
  %xor1.i.1 = xor i64 %47, %add33.1
  %mul.i154.1 = mul i64 %xor1.i.1, 2654435761
  %48 = shl i64 %indvars.iv, 3
  %mul37.1 = add i64 %48, 136
  %idxprom38.1 = and i64 %mul37.1, 4294967176
  %arrayidx39.1 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.1
  %49 = load i64, ptr %arrayidx39.1, align 8
  %add33.2 = add i64 %ahead.sroa.10.1, %mul.i154.1
  %shr.i.2 = lshr i64 %add33.2, 47
  %50 = xor i64 %11, %shr.i.2
  %xor1.i.2 = xor i64 %50, %add33.2
  %mul.i154.2 = mul i64 %xor1.i.2, 2654435761
  %51 = shl i64 %indvars.iv, 3
  %mul37.2 = add i64 %51, 144
  %idxprom38.2 = and i64 %mul37.2, 4294967184
  %arrayidx39.2 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.2
  %52 = load i64, ptr %arrayidx39.2, align 8
  %add33.3 = add i64 %ahead.sroa.14.1, %mul.i154.2
  %shr.i.3 = lshr i64 %add33.3, 47
  %53 = xor i64 %11, %shr.i.3
  %xor1.i.3 = xor i64 %53, %add33.3
  %mul.i154.3 = mul i64 %xor1.i.3, 2654435761
  %54 = shl i64 %indvars.iv, 3
  %mul37.3 = add i64 %54, 152
  %idxprom38.3 = and i64 %mul37.3, 4294967192
  %arrayidx39.3 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.3
  %55 = load i64, ptr %arrayidx39.3, align 8
  %add33.4 = add i64 %ahead.sroa.18.1, %mul.i154.3
  %shr.i.4 = lshr i64 %add33.4, 47
  %56 = xor i64 %11, %shr.i.4
  %xor1.i.4 = xor i64 %56, %add33.4
  %mul.i154.4 = mul i64 %xor1.i.4, 2654435761
  %57 = shl i64 %indvars.iv, 3
  %mul37.4 = add i64 %57, 160
  %idxprom38.4 = and i64 %mul37.4, 4294967200
  %arrayidx39.4 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.4
  %58 = load i64, ptr %arrayidx39.4, align 8
  %add33.5 = add i64 %ahead.sroa.22.1, %mul.i154.4
  %shr.i.5 = lshr i64 %add33.5, 47
  %59 = xor i64 %11, %shr.i.5
  %xor1.i.5 = xor i64 %59, %add33.5
  %mul.i154.5 = mul i64 %xor1.i.5, 2654435761
  %60 = shl i64 %indvars.iv, 3
  %mul37.5 = add i64 %60, 168
  %idxprom38.5 = and i64 %mul37.5, 4294967208
  %arrayidx39.5 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.5
  %61 = load i64, ptr %arrayidx39.5, align 8
  %add33.6 = add i64 %ahead.sroa.26.1, %mul.i154.5
  %shr.i.6 = lshr i64 %add33.6, 47
  %62 = xor i64 %11, %shr.i.6
  %xor1.i.6 = xor i64 %62, %add33.6
  %mul.i154.6 = mul i64 %xor1.i.6, 2654435761
  %63 = shl i64 %indvars.iv, 3
  %mul37.6 = add i64 %63, 176
  %idxprom38.6 = and i64 %mul37.6, 4294967216
  %arrayidx39.6 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.6
  %64 = load i64, ptr %arrayidx39.6, align 8
  %add33.7 = add i64 %ahead.sroa.30.1, %mul.i154.6
  %shr.i.7 = lshr i64 %add33.7, 47
  %65 = xor i64 %11, %shr.i.7
  %xor1.i.7 = xor i64 %65, %add33.7
  %mul.i154.7 = mul i64 %xor1.i.7, 2654435761
  %66 = shl i64 %indvars.iv, 3
  %mul37.7 = add i64 %66, 184
  %idxprom38.7 = and i64 %mul37.7, 4294967224
  %arrayidx39.7 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.7
  %67 = load i64, ptr %arrayidx39.7, align 8
  %add33.8 = add i64 %ahead.sroa.34.1, %mul.i154.7
  %shr.i.8 = lshr i64 %add33.8, 47
  %68 = xor i64 %11, %shr.i.8
  %xor1.i.8 = xor i64 %68, %add33.8
  %mul.i154.8 = mul i64 %xor1.i.8, 2654435761
  %69 = shl i64 %indvars.iv, 3
  %mul37.8 = add i64 %69, 192
  %idxprom38.8 = and i64 %mul37.8, 4294967232
  %arrayidx39.8 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.8
  %70 = load i64, ptr %arrayidx39.8, align 8
  %add33.9 = add i64 %ahead.sroa.38.1, %mul.i154.8
  %shr.i.9 = lshr i64 %add33.9, 47
  %71 = xor i64 %11, %shr.i.9
  %xor1.i.9 = xor i64 %71, %add33.9
  %mul.i154.9 = mul i64 %xor1.i.9, 2654435761
  %72 = shl i64 %indvars.iv, 3
  %mul37.9 = add i64 %72, 200
  %idxprom38.9 = and i64 %mul37.9, 4294967240
  %arrayidx39.9 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.9
  %73 = load i64, ptr %arrayidx39.9, align 8
  %add33.10 = add i64 %ahead.sroa.42.1, %mul.i154.9
  %shr.i.10 = lshr i64 %add33.10, 47
  %74 = xor i64 %11, %shr.i.10
  %xor1.i.10 = xor i64 %74, %add33.10
  %mul.i154.10 = mul i64 %xor1.i.10, 2654435761
  %75 = shl i64 %indvars.iv, 3
  %mul37.10 = add i64 %75, 208
  %idxprom38.10 = and i64 %mul37.10, 4294967248
  %arrayidx39.10 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.10
  %76 = load i64, ptr %arrayidx39.10, align 8
  %add33.11 = add i64 %ahead.sroa.46.1, %mul.i154.10
  %shr.i.11 = lshr i64 %add33.11, 47
  %77 = xor i64 %11, %shr.i.11
  %xor1.i.11 = xor i64 %77, %add33.11
  %mul.i154.11 = mul i64 %xor1.i.11, 2654435761
  %78 = shl i64 %indvars.iv, 3
  %mul37.11 = add i64 %78, 216
  %idxprom38.11 = and i64 %mul37.11, 4294967256
  %arrayidx39.11 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.11
  %79 = load i64, ptr %arrayidx39.11, align 8
  %add33.12 = add i64 %ahead.sroa.50.1, %mul.i154.11
  %shr.i.12 = lshr i64 %add33.12, 47
  %80 = xor i64 %11, %shr.i.12
  %xor1.i.12 = xor i64 %80, %add33.12
  %mul.i154.12 = mul i64 %xor1.i.12, 2654435761
  %81 = shl i64 %indvars.iv, 3
  %mul37.12 = add i64 %81, 224
  %idxprom38.12 = and i64 %mul37.12, 4294967264
  %arrayidx39.12 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.12
  %82 = load i64, ptr %arrayidx39.12, align 8
  %add33.13 = add i64 %ahead.sroa.54.1, %mul.i154.12
  %shr.i.13 = lshr i64 %add33.13, 47
  %83 = xor i64 %11, %shr.i.13
  %xor1.i.13 = xor i64 %83, %add33.13
  %mul.i154.13 = mul i64 %xor1.i.13, 2654435761
  %84 = shl i64 %indvars.iv, 3
  %mul37.13 = add i64 %84, 232
  %idxprom38.13 = and i64 %mul37.13, 4294967272
  %arrayidx39.13 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.13
  %85 = load i64, ptr %arrayidx39.13, align 8
  %add33.14 = add i64 %ahead.sroa.58.1, %mul.i154.13
  %shr.i.14 = lshr i64 %add33.14, 47
  %86 = xor i64 %11, %shr.i.14
  %xor1.i.14 = xor i64 %86, %add33.14
  %mul.i154.14 = mul i64 %xor1.i.14, 2654435761
  %87 = shl i64 %indvars.iv, 3
  %mul37.14 = add i64 %87, 240
  %idxprom38.14 = and i64 %mul37.14, 4294967280
  %arrayidx39.14 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.14
  %88 = load i64, ptr %arrayidx39.14, align 8
  %add33.15 = add i64 %ahead.sroa.62.1, %mul.i154.14
  %shr.i.15 = lshr i64 %add33.15, 47
  %89 = xor i64 %11, %shr.i.15
  %xor1.i.15 = xor i64 %89, %add33.15
  %mul.i154.15 = mul i64 %xor1.i.15, 2654435761
  %90 = shl i64 %indvars.iv, 3
  %mul37.15 = add i64 %90, 248
  %idxprom38.15 = and i64 %mul37.15, 4294967288
  %arrayidx39.15 = getelementptr i64, ptr %add.ptr5, i64 %idxprom38.15
  %91 = load i64, ptr %arrayidx39.15, align 8
  %92 = add i64 %indvars.iv, 48
  %cmp22.not = icmp ugt i64 %92, %1
  br i1 %cmp22.not, label %for.cond49.preheader.loopexit, label %for.cond26.preheader

if.end:
  %total.3 = phi i64 [ %mul.i157.15, %for.cond49.preheader ], [ %10, %for.body ]
  %block.1 = phi i32 [ %add61, %for.cond49.preheader ], [ 0, %for.body ]
  %cmp63192 = icmp ult i32 %block.1, %conv.i
  br i1 %cmp63192, label %for.body65.preheader, label %for.end73

for.body65.preheader:
  %93 = zext i32 %block.1 to i64
  %94 = sub i64 %div1.i, %93
  %.neg = add i64 %93, 1
  %xtraiter = and i64 %94, 1
  %lcmp.mod.not = icmp eq i64 %xtraiter, 0
  br i1 %lcmp.mod.not, label %for.body65.prol.loopexit, label %for.body65.prol

for.body65.prol:
  %mul66.prol = shl i64 %93, 3
  %idxprom67.prol = and i64 %mul66.prol, 4294967288
  %arrayidx68.prol = getelementptr i64, ptr %add.ptr5, i64 %idxprom67.prol
  %95 = load i64, ptr %arrayidx68.prol, align 8
  %add69.prol = add i64 %95, %total.3
  %shr.i158.prol = lshr i64 %add69.prol, 47
  %96 = xor i64 %11, %shr.i158.prol
  %xor1.i159.prol = xor i64 %96, %add69.prol
  %mul.i160.prol = mul i64 %xor1.i159.prol, 2654435761
  %indvars.iv.next213.prol = add i64 %93, 1
  br label %for.body65.prol.loopexit

for.body65.prol.loopexit:
  %mul.i160.lcssa.unr = phi i64 [ poison, %for.body65.preheader ], [ %mul.i160.prol, %for.body65.prol ]
  %indvars.iv212.unr = phi i64 [ %93, %for.body65.preheader ], [ %indvars.iv.next213.prol, %for.body65.prol ]
  %total.4193.unr = phi i64 [ %total.3, %for.body65.preheader ], [ %mul.i160.prol, %for.body65.prol ]
  %97 = icmp eq i64 %1, %.neg
  br i1 %97, label %for.end73, label %for.body65

for.body65:
  %indvars.iv212 = phi i64 [ %indvars.iv.next213.1, %for.body65 ], [ %indvars.iv212.unr, %for.body65.prol.loopexit ]
  %total.4193 = phi i64 [ %mul.i160.1, %for.body65 ], [ %total.4193.unr, %for.body65.prol.loopexit ]
  %mul66 = shl i64 %indvars.iv212, 3
  %idxprom67 = and i64 %mul66, 4294967288
  %arrayidx68 = getelementptr i64, ptr %add.ptr5, i64 %idxprom67
  %98 = load i64, ptr %arrayidx68, align 8
  %add69 = add i64 %98, %total.4193
  %shr.i158 = lshr i64 %add69, 47
  %99 = xor i64 %11, %shr.i158
  %xor1.i159 = xor i64 %99, %add69
  %mul.i160 = mul i64 %xor1.i159, 2654435761
  %indvars.iv.next213 = shl i64 %indvars.iv212, 3
  %mul66.1 = add i64 %indvars.iv.next213, 8
  %idxprom67.1 = and i64 %mul66.1, 4294967288
  %arrayidx68.1 = getelementptr i64, ptr %add.ptr5, i64 %idxprom67.1
  %100 = load i64, ptr %arrayidx68.1, align 8
  %add69.1 = add i64 %100, %mul.i160
  %shr.i158.1 = lshr i64 %add69.1, 47
  %101 = xor i64 %11, %shr.i158.1
  %xor1.i159.1 = xor i64 %101, %add69.1
  %mul.i160.1 = mul i64 %xor1.i159.1, 2654435761
  %indvars.iv.next213.1 = add i64 %indvars.iv212, 2
  %exitcond.not.1 = icmp eq i64 %indvars.iv.next213.1, %1
  br i1 %exitcond.not.1, label %for.end73, label %for.body65

for.end73:
  %total.4.lcssa = phi i64 [ %total.3, %if.end ], [ %mul.i160.lcssa.unr, %for.body65.prol.loopexit ], [ %mul.i160.1, %for.body65 ]
  %mul76 = mul i64 %div75151, %conv
  %add.ptr77 = getelementptr i64, ptr %rows, i64 %mul76
  %xor1.i176 = xor i32 %rem, 1
  %idxprom2.i177 = zext i32 %xor1.i176 to i64
  br i1 %cmp82196, label %for.body85, label %for.cond.cleanup84

for.cond.cleanup84:
  %total.5.lcssa = phi i64 [ %total.4.lcssa, %for.end73 ], [ %add92, %for.body85 ]
  %add.ptr98 = getelementptr i8, ptr %add.ptr77, i64 %add.ptr98.idx
  %arrayidx.i162 = getelementptr i64, ptr %add.ptr98, i64 %idx.ext
  %102 = load i64, ptr %arrayidx.i162, align 8
  %103 = getelementptr i64, ptr @SECRET, i64 %idx.ext
  %arrayidx.i.i = getelementptr i8, ptr %103, i64 120
  %104 = load i64, ptr %arrayidx.i.i, align 8
  %arrayidx3.i.i = getelementptr i8, ptr %103, i64 128
  %105 = load i64, ptr %arrayidx3.i.i, align 8
  %or.i.i = tail call i64 @llvm.fshl.i64(i64 %105, i64 %104, i64 56)
  %xor.i = xor i64 %or.i.i, %102
  %arrayidx3.i164 = getelementptr i64, ptr %add.ptr98, i64 %idxprom2.i177
  %106 = load i64, ptr %arrayidx3.i164, align 8
  %and.i = and i64 %xor.i, 4294967295
  %shr.i165 = lshr i64 %xor.i, 32
  %mul4.i = mul i64 %and.i, %shr.i165
  %add5.i = add i64 %106, %total.5.lcssa
  %add100 = add i64 %add5.i, %mul4.i
  %arrayidx102 = getelementptr i64, ptr %totals, i64 %indvars.iv218
  store i64 %add100, ptr %arrayidx102, align 8
  %indvars.iv.next219 = add i64 %indvars.iv218, 1
  %exitcond222.not = icmp eq i64 %indvars.iv.next219, %wide.trip.count221
  br i1 %exitcond222.not, label %for.cond.cleanup, label %for.body

for.body85:
  %indvars.iv215 = phi i64 [ %indvars.iv.next216, %for.body85 ], [ %4, %for.end73 ]
  %total.5197 = phi i64 [ %add92, %for.body85 ], [ %total.4.lcssa, %for.end73 ]
  %add.ptr88.idx = shl i64 %indvars.iv215, 6
  %add.ptr88 = getelementptr i8, ptr %add.ptr77, i64 %add.ptr88.idx
  %107 = trunc i64 %indvars.iv215 to i32
  %mul90 = and i32 %107, 15
  %arrayidx.i167 = getelementptr i64, ptr %add.ptr88, i64 %idx.ext
  %108 = load i64, ptr %arrayidx.i167, align 8
  %div11.i.i168 = add i32 %mul90, %rem
  %idxprom.i.i169 = zext i32 %div11.i.i168 to i64
  %arrayidx.i.i170 = getelementptr i64, ptr @SECRET, i64 %idxprom.i.i169
  %109 = load i64, ptr %arrayidx.i.i170, align 8
  %xor.i175 = xor i64 %109, %108
  %arrayidx3.i178 = getelementptr i64, ptr %add.ptr88, i64 %idxprom2.i177
  %110 = load i64, ptr %arrayidx3.i178, align 8
  %and.i179 = and i64 %xor.i175, 4294967295
  %shr.i180 = lshr i64 %xor.i175, 32
  %mul4.i181 = mul i64 %and.i179, %shr.i180
  %add5.i182 = add i64 %110, %total.5197
  %add92 = add i64 %add5.i182, %mul4.i181
  %indvars.iv.next216 = add i64 %indvars.iv215, 1
  %lftr.wideiv = trunc i64 %indvars.iv.next216 to i32
  %exitcond217.not = icmp eq i32 %8, %lftr.wideiv
  br i1 %exitcond217.not, label %for.cond.cleanup84, label %for.body85
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
