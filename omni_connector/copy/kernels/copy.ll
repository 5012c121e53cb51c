; clang 19, sha256 of the C 41955b4b2a38936c
; scripts/compile_kernels.py has made this file.

%struct.state = type { [8 x i64], i64, i64 }

@SECRET = internal unnamed_addr constant [192 x i8] c"\B8\FEl9#\A4K\BE|\01\81,\F7!\AD\1C\DE\D4m\E9\83\90\97\DBr@\A4\A4\B7\B3g\1F\CBy\E6N\CC\C0\E5x\82Z\D0}\CC\FFr!\B8\08Ft\F7C$\8E\E05\90\E6\81:&L<(R\BB\91\C3\00\CB\88\D0e\8B\1BS.\A3qdH\97\A2\0D\F9N8\19\EFF\A9\DE\AC\D8\A8\FAv?\E3\9C4?\F9\DC\BB\C7\C7\0BO\1D\8AQ\E0K\CD\B4Y1\C8\9F~\C9\D9xsd\EA\C5\AC\834\D3\EB\C3\C5\81\A0\FF\FA\13c\EB\17\0D\DDQ\B7\F0\DAI\D3\16U&)\D4h\9E+\16\BEX}G\A1\FC\8F\F8\B8\D1z\D01\CEE\CB:\8F\95\16\04(\AF\D7\FB\CA\BBK@~", align 64

define void @copy(ptr %targets, ptr %sources, ptr %lengths, i64 %slots, i64 %rows, ptr %states) {
entry:
  %cmp.i20.not = icmp eq i64 %slots, 0
  br i1 %cmp.i20.not, label %run.exit, label %for.body.i.lr.ph

for.body.i.lr.ph:
  %cmp5.i14.not = icmp eq i64 %rows, 0
  %mul.i = mul i64 %rows, %slots
  br label %for.body.i

for.body.i:
  %row.0.i22 = phi i64 [ 0, %for.body.i.lr.ph ], [ %row.1.i.lcssa, %for.cond.cleanup6.i ]
  %slot.0.i21 = phi i64 [ 0, %for.body.i.lr.ph ], [ %inc116.i, %for.cond.cleanup6.i ]
  br i1 %cmp5.i14.not, label %for.cond.cleanup6.i, label %for.body7.i

for.cond.cleanup6.i:
  %row.1.i.lcssa = phi i64 [ %row.0.i22, %for.body.i ], [ %add.i, %for.cond.cleanup25.i ]
  %inc116.i = add i64 %slot.0.i21, 1
  %exitcond25.not = icmp eq i64 %inc116.i, %slots
  br i1 %exitcond25.not, label %run.exit, label %for.body.i

for.body7.i:
  %row.1.i18 = phi i64 [ %add.i, %for.cond.cleanup25.i ], [ %row.0.i22, %for.body.i ]
  %j.0.i15 = phi i64 [ %inc96.i, %for.cond.cleanup25.i ], [ 0, %for.body.i ]
  %arrayidx8.i = getelementptr ptr, ptr %sources, i64 %row.1.i18
  %0 = load ptr, ptr %arrayidx8.i, align 8
  %add.i = add i64 %row.1.i18, 1
  %cmp9.i = icmp ult i64 %add.i, %mul.i
  %cond.i = select i1 %cmp9.i, i64 %add.i, i64 %row.1.i18
  %arrayidx11.i = getelementptr ptr, ptr %sources, i64 %cond.i
  %1 = load ptr, ptr %arrayidx11.i, align 8
  %arrayidx13.i = getelementptr ptr, ptr %targets, i64 %row.1.i18
  %2 = load ptr, ptr %arrayidx13.i, align 8
  %arrayidx17.i = getelementptr i64, ptr %lengths, i64 %j.0.i15
  %3 = load i64, ptr %arrayidx17.i, align 8
  %div180.i = lshr i64 %3, 6
  %cond22.i = tail call i64 @llvm.umin.i64(i64 %div180.i, i64 128)
  %cmp24.i9.not = icmp ult i64 %3, 64
  br i1 %cmp24.i9.not, label %for.cond.cleanup25.i, label %for.body26.i.lr.ph

for.body26.i.lr.ph:
  %mul33.i = shl i64 %cond22.i, 6
  br label %for.body26.i

for.cond.cleanup25.i:
  %inc96.i = add i64 %j.0.i15, 1
  %exitcond.not = icmp eq i64 %inc96.i, %rows
  br i1 %exitcond.not, label %for.cond.cleanup6.i, label %for.body7.i

for.body26.i:
  %i.0.i10 = phi i64 [ 0, %for.body26.i.lr.ph ], [ %inc92.i, %if.end93.i ]
  %mul27.i = shl i64 %i.0.i10, 6
  %add.ptr.i = getelementptr i8, ptr %0, i64 %mul27.i
  %add.ptr29.i = getelementptr i8, ptr %2, i64 %mul27.i
  %add30.i = add i64 %i.0.i10, %cond22.i
  %cmp31.i = icmp ult i64 %add30.i, %div180.i
  %add.ptr34.i = getelementptr i8, ptr %add.ptr.i, i64 %mul33.i
  %sub.i = sub i64 %add30.i, %div180.i
  %mul37.i = shl i64 %sub.i, 6
  %add.ptr38.i = getelementptr i8, ptr %1, i64 %mul37.i
  %cond40.i = select i1 %cmp31.i, ptr %add.ptr34.i, ptr %add.ptr38.i
  %sub42.i = sub i64 %div180.i, %i.0.i10
  %cmp43.i = icmp ugt i64 %sub42.i, 15
  tail call void @llvm.prefetch.p0(ptr %cond40.i, i32 0, i32 2, i32 1)
  %4 = load <8 x i64>, ptr %add.ptr.i, align 1
  store <8 x i64> %4, ptr %add.ptr29.i, align 64, !nontemporal !0
  br i1 %cmp43.i, label %for.body51.i.preheader, label %if.end93.i

for.body51.i.preheader:
  %add.ptr53.i.1 = getelementptr i8, ptr %add.ptr.i, i64 64
  %add.ptr55.i.1 = getelementptr i8, ptr %add.ptr29.i, i64 64
  %add.ptr57.i.1 = getelementptr i8, ptr %cond40.i, i64 64
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.1, i32 0, i32 2, i32 1)
  %5 = load <8 x i64>, ptr %add.ptr53.i.1, align 1
  store <8 x i64> %5, ptr %add.ptr55.i.1, align 64, !nontemporal !0
  %add.ptr53.i.2 = getelementptr i8, ptr %add.ptr.i, i64 128
  %add.ptr55.i.2 = getelementptr i8, ptr %add.ptr29.i, i64 128
  %add.ptr57.i.2 = getelementptr i8, ptr %cond40.i, i64 128
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.2, i32 0, i32 2, i32 1)
  %6 = load <8 x i64>, ptr %add.ptr53.i.2, align 1
  store <8 x i64> %6, ptr %add.ptr55.i.2, align 64, !nontemporal !0
  %add.ptr53.i.3 = getelementptr i8, ptr %add.ptr.i, i64 192
  %add.ptr55.i.3 = getelementptr i8, ptr %add.ptr29.i, i64 192
  %add.ptr57.i.3 = getelementptr i8, ptr %cond40.i, i64 192
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.3, i32 0, i32 2, i32 1)
  %7 = load <8 x i64>, ptr %add.ptr53.i.3, align 1
  store <8 x i64> %7, ptr %add.ptr55.i.3, align 64, !nontemporal !0
  %add.ptr53.i.4 = getelementptr i8, ptr %add.ptr.i, i64 256
  %add.ptr55.i.4 = getelementptr i8, ptr %add.ptr29.i, i64 256
  %add.ptr57.i.4 = getelementptr i8, ptr %cond40.i, i64 256
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.4, i32 0, i32 2, i32 1)
  %8 = load <8 x i64>, ptr %add.ptr53.i.4, align 1
  store <8 x i64> %8, ptr %add.ptr55.i.4, align 64, !nontemporal !0
  %add.ptr53.i.5 = getelementptr i8, ptr %add.ptr.i, i64 320
  %add.ptr55.i.5 = getelementptr i8, ptr %add.ptr29.i, i64 320
  %add.ptr57.i.5 = getelementptr i8, ptr %cond40.i, i64 320
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.5, i32 0, i32 2, i32 1)
  %9 = load <8 x i64>, ptr %add.ptr53.i.5, align 1
  store <8 x i64> %9, ptr %add.ptr55.i.5, align 64, !nontemporal !0
  %add.ptr53.i.6 = getelementptr i8, ptr %add.ptr.i, i64 384
  %add.ptr55.i.6 = getelementptr i8, ptr %add.ptr29.i, i64 384
  %add.ptr57.i.6 = getelementptr i8, ptr %cond40.i, i64 384
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.6, i32 0, i32 2, i32 1)
  %10 = load <8 x i64>, ptr %add.ptr53.i.6, align 1
  store <8 x i64> %10, ptr %add.ptr55.i.6, align 64, !nontemporal !0
  %add.ptr53.i.7 = getelementptr i8, ptr %add.ptr.i, i64 448
  %add.ptr55.i.7 = getelementptr i8, ptr %add.ptr29.i, i64 448
  %add.ptr57.i.7 = getelementptr i8, ptr %cond40.i, i64 448
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.7, i32 0, i32 2, i32 1)
  %11 = load <8 x i64>, ptr %add.ptr53.i.7, align 1
  store <8 x i64> %11, ptr %add.ptr55.i.7, align 64, !nontemporal !0
  %add.ptr53.i.8 = getelementptr i8, ptr %add.ptr.i, i64 512
  %add.ptr55.i.8 = getelementptr i8, ptr %add.ptr29.i, i64 512
  %add.ptr57.i.8 = getelementptr i8, ptr %cond40.i, i64 512
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.8, i32 0, i32 2, i32 1)
  %12 = load <8 x i64>, ptr %add.ptr53.i.8, align 1
  store <8 x i64> %12, ptr %add.ptr55.i.8, align 64, !nontemporal !0
  %add.ptr53.i.9 = getelementptr i8, ptr %add.ptr.i, i64 576
  %add.ptr55.i.9 = getelementptr i8, ptr %add.ptr29.i, i64 576
  %add.ptr57.i.9 = getelementptr i8, ptr %cond40.i, i64 576
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.9, i32 0, i32 2, i32 1)
  %13 = load <8 x i64>, ptr %add.ptr53.i.9, align 1
  store <8 x i64> %13, ptr %add.ptr55.i.9, align 64, !nontemporal !0
  %add.ptr53.i.10 = getelementptr i8, ptr %add.ptr.i, i64 640
  %add.ptr55.i.10 = getelementptr i8, ptr %add.ptr29.i, i64 640
  %add.ptr57.i.10 = getelementptr i8, ptr %cond40.i, i64 640
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.10, i32 0, i32 2, i32 1)
  %14 = load <8 x i64>, ptr %add.ptr53.i.10, align 1
  store <8 x i64> %14, ptr %add.ptr55.i.10, align 64, !nontemporal !0
  %add.ptr53.i.11 = getelementptr i8, ptr %add.ptr.i, i64 704
  %add.ptr55.i.11 = getelementptr i8, ptr %add.ptr29.i, i64 704
  %add.ptr57.i.11 = getelementptr i8, ptr %cond40.i, i64 704
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.11, i32 0, i32 2, i32 1)
  %15 = load <8 x i64>, ptr %add.ptr53.i.11, align 1
  store <8 x i64> %15, ptr %add.ptr55.i.11, align 64, !nontemporal !0
  %add.ptr53.i.12 = getelementptr i8, ptr %add.ptr.i, i64 768
  %add.ptr55.i.12 = getelementptr i8, ptr %add.ptr29.i, i64 768
  %add.ptr57.i.12 = getelementptr i8, ptr %cond40.i, i64 768
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.12, i32 0, i32 2, i32 1)
  %16 = load <8 x i64>, ptr %add.ptr53.i.12, align 1
  store <8 x i64> %16, ptr %add.ptr55.i.12, align 64, !nontemporal !0
  %add.ptr53.i.13 = getelementptr i8, ptr %add.ptr.i, i64 832
  %add.ptr55.i.13 = getelementptr i8, ptr %add.ptr29.i, i64 832
  %add.ptr57.i.13 = getelementptr i8, ptr %cond40.i, i64 832
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.13, i32 0, i32 2, i32 1)
  %17 = load <8 x i64>, ptr %add.ptr53.i.13, align 1
  store <8 x i64> %17, ptr %add.ptr55.i.13, align 64, !nontemporal !0
  %add.ptr53.i.14 = getelementptr i8, ptr %add.ptr.i, i64 896
  %add.ptr55.i.14 = getelementptr i8, ptr %add.ptr29.i, i64 896
  %add.ptr57.i.14 = getelementptr i8, ptr %cond40.i, i64 896
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.14, i32 0, i32 2, i32 1)
  %18 = load <8 x i64>, ptr %add.ptr53.i.14, align 1
  store <8 x i64> %18, ptr %add.ptr55.i.14, align 64, !nontemporal !0
  %add.ptr53.i.15 = getelementptr i8, ptr %add.ptr.i, i64 960
  %add.ptr55.i.15 = getelementptr i8, ptr %add.ptr29.i, i64 960
  %add.ptr57.i.15 = getelementptr i8, ptr %cond40.i, i64 960
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.15, i32 0, i32 2, i32 1)
  %19 = load <8 x i64>, ptr %add.ptr53.i.15, align 1
  store <8 x i64> %19, ptr %add.ptr55.i.15, align 64, !nontemporal !0
  br label %if.end93.i

if.end93.i:
  %.sink = phi i64 [ 16, %for.body51.i.preheader ], [ 1, %for.body26.i ]
  %inc92.i = add i64 %i.0.i10, %.sink
  %cmp24.i = icmp ult i64 %inc92.i, %div180.i
  br i1 %cmp24.i, label %for.body26.i, label %for.cond.cleanup25.i

run.exit:
  fence seq_cst
  ret void
}

define void @copy_hashed(ptr %targets, ptr %sources, ptr %lengths, i64 %slots, i64 %rows, ptr %states) {
entry:
  %cmp.i42.not = icmp eq i64 %slots, 0
  br i1 %cmp.i42.not, label %run.exit, label %for.body.i.lr.ph

for.body.i.lr.ph:
  %cmp5.i34.not = icmp eq i64 %rows, 0
  %mul.i = mul i64 %rows, %slots
  %0 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 128), align 64
  %1 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 11), align 1
  %2 = load <8 x i64>, ptr @SECRET, align 64
  %3 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 8), align 8
  %4 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 16), align 16
  %5 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 24), align 8
  %6 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 32), align 32
  %7 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 40), align 8
  %8 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 48), align 16
  %9 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 56), align 8
  %10 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 64), align 64
  %11 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 72), align 8
  %12 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 80), align 16
  %13 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 88), align 8
  %14 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 96), align 32
  %15 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 104), align 8
  %16 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 112), align 16
  %17 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 120), align 8
  br label %for.body.i

for.body.i:
  %row.0.i44 = phi i64 [ 0, %for.body.i.lr.ph ], [ %row.1.i.lcssa, %if.end114.i ]
  %slot.0.i43 = phi i64 [ 0, %for.body.i.lr.ph ], [ %inc116.i, %if.end114.i ]
  %arrayidx.i = getelementptr %struct.state, ptr %states, i64 %slot.0.i43
  %18 = load <8 x i64>, ptr %arrayidx.i, align 1
  %left2.i = getelementptr i8, ptr %arrayidx.i, i64 64
  %19 = load i64, ptr %left2.i, align 8
  %total3.i = getelementptr i8, ptr %arrayidx.i, i64 72
  %20 = load i64, ptr %total3.i, align 8
  br i1 %cmp5.i34.not, label %for.cond.cleanup6.i, label %for.body7.i

for.cond.cleanup6.i.loopexit:
  %.pre = load i64, ptr %left2.i, align 8
  br label %for.cond.cleanup6.i

for.cond.cleanup6.i:
  %21 = phi i64 [ %19, %for.body.i ], [ %.pre, %for.cond.cleanup6.i.loopexit ]
  %left.0.i.lcssa = phi i64 [ %19, %for.body.i ], [ %left.1.i.lcssa, %for.cond.cleanup6.i.loopexit ]
  %sums.0.i.lcssa = phi <8 x i64> [ %18, %for.body.i ], [ %sums.1.i.lcssa, %for.cond.cleanup6.i.loopexit ]
  %row.1.i.lcssa = phi i64 [ %row.0.i44, %for.body.i ], [ %add.i, %for.cond.cleanup6.i.loopexit ]
  %cmp102.not.i = icmp eq i64 %21, 0
  br i1 %cmp102.not.i, label %if.end114.i, label %if.then103.i

for.body7.i:
  %row.1.i38 = phi i64 [ %add.i, %for.cond.cleanup25.i ], [ %row.0.i44, %for.body.i ]
  %sums.0.i37 = phi <8 x i64> [ %sums.1.i.lcssa, %for.cond.cleanup25.i ], [ %18, %for.body.i ]
  %left.0.i36 = phi i64 [ %left.1.i.lcssa, %for.cond.cleanup25.i ], [ %19, %for.body.i ]
  %j.0.i35 = phi i64 [ %inc96.i, %for.cond.cleanup25.i ], [ 0, %for.body.i ]
  %arrayidx8.i = getelementptr ptr, ptr %sources, i64 %row.1.i38
  %22 = load ptr, ptr %arrayidx8.i, align 8
  %add.i = add i64 %row.1.i38, 1
  %cmp9.i = icmp ult i64 %add.i, %mul.i
  %cond.i = select i1 %cmp9.i, i64 %add.i, i64 %row.1.i38
  %arrayidx11.i = getelementptr ptr, ptr %sources, i64 %cond.i
  %23 = load ptr, ptr %arrayidx11.i, align 8
  %arrayidx13.i = getelementptr ptr, ptr %targets, i64 %row.1.i38
  %24 = load ptr, ptr %arrayidx13.i, align 8
  %arrayidx17.i = getelementptr i64, ptr %lengths, i64 %j.0.i35
  %25 = load i64, ptr %arrayidx17.i, align 8
  %div180.i = lshr i64 %25, 6
  %cond22.i = tail call i64 @llvm.umin.i64(i64 %div180.i, i64 128)
  %cmp24.i29.not = icmp ult i64 %25, 64
  br i1 %cmp24.i29.not, label %for.cond.cleanup25.i, label %for.body26.i.lr.ph

for.body26.i.lr.ph:
  %mul33.i = shl i64 %cond22.i, 6
  br label %for.body26.i

for.cond.cleanup25.i:
  %left.1.i.lcssa = phi i64 [ %left.0.i36, %for.body7.i ], [ %dec.i, %if.end93.i ]
  %sums.1.i.lcssa = phi <8 x i64> [ %sums.0.i37, %for.body7.i ], [ %sums.6.i, %if.end93.i ]
  %inc96.i = add i64 %j.0.i35, 1
  %exitcond.not = icmp eq i64 %inc96.i, %rows
  br i1 %exitcond.not, label %for.cond.cleanup6.i.loopexit, label %for.body7.i

for.body26.i:
  %sums.1.i32 = phi <8 x i64> [ %sums.0.i37, %for.body26.i.lr.ph ], [ %sums.6.i, %if.end93.i ]
  %left.1.i31 = phi i64 [ %left.0.i36, %for.body26.i.lr.ph ], [ %dec.i, %if.end93.i ]
  %i.0.i30 = phi i64 [ 0, %for.body26.i.lr.ph ], [ %inc92.i, %if.end93.i ]
  %mul27.i = shl i64 %i.0.i30, 6
  %add.ptr.i = getelementptr i8, ptr %22, i64 %mul27.i
  %add.ptr29.i = getelementptr i8, ptr %24, i64 %mul27.i
  %add30.i = add i64 %i.0.i30, %cond22.i
  %cmp31.i = icmp ult i64 %add30.i, %div180.i
  %add.ptr34.i = getelementptr i8, ptr %add.ptr.i, i64 %mul33.i
  %sub.i = sub i64 %add30.i, %div180.i
  %mul37.i = shl i64 %sub.i, 6
  %add.ptr38.i = getelementptr i8, ptr %23, i64 %mul37.i
  %cond40.i = select i1 %cmp31.i, ptr %add.ptr34.i, ptr %add.ptr38.i
  %sub41.i = sub i64 %20, %left.1.i31
  %rem.i = and i64 %sub41.i, 15
  %sub42.i = sub i64 %div180.i, %i.0.i30
  %cmp43.i = icmp ugt i64 %sub42.i, 15
  br i1 %cmp43.i, label %land.lhs.true.i, label %if.else.i

land.lhs.true.i:
  %cmp45.i = icmp eq i64 %rem.i, 0
  %cmp47.i = icmp ugt i64 %left.1.i31, 16
  %or.cond.i = select i1 %cmp45.i, i1 %cmp47.i, i1 false
  br i1 %or.cond.i, label %for.body51.i.preheader, label %if.else.i

for.body51.i.preheader:
  tail call void @llvm.prefetch.p0(ptr %cond40.i, i32 0, i32 2, i32 1)
  %26 = load <8 x i64>, ptr %add.ptr.i, align 1
  store <8 x i64> %26, ptr %add.ptr29.i, align 64, !nontemporal !0
  %xor.i = xor <8 x i64> %2, %26
  %shuffle.i = shufflevector <8 x i64> %26, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7 = add <8 x i64> %shuffle.i, %sums.1.i32
  %and.i = and <8 x i64> %xor.i, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8 = lshr <8 x i64> %xor.i, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9 = mul <8 x i64> %and.i, %shr.i8
  %add1.i = add <8 x i64> %add.i7, %mul.i9
  %add.ptr53.i.1 = getelementptr i8, ptr %add.ptr.i, i64 64
  %add.ptr55.i.1 = getelementptr i8, ptr %add.ptr29.i, i64 64
  %add.ptr57.i.1 = getelementptr i8, ptr %cond40.i, i64 64
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.1, i32 0, i32 2, i32 1)
  %27 = load <8 x i64>, ptr %add.ptr53.i.1, align 1
  store <8 x i64> %27, ptr %add.ptr55.i.1, align 64, !nontemporal !0
  %xor.i.1 = xor <8 x i64> %3, %27
  %shuffle.i.1 = shufflevector <8 x i64> %27, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.1 = add <8 x i64> %shuffle.i.1, %add1.i
  %and.i.1 = and <8 x i64> %xor.i.1, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.1 = lshr <8 x i64> %xor.i.1, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.1 = mul <8 x i64> %and.i.1, %shr.i8.1
  %add1.i.1 = add <8 x i64> %add.i7.1, %mul.i9.1
  %add.ptr53.i.2 = getelementptr i8, ptr %add.ptr.i, i64 128
  %add.ptr55.i.2 = getelementptr i8, ptr %add.ptr29.i, i64 128
  %add.ptr57.i.2 = getelementptr i8, ptr %cond40.i, i64 128
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.2, i32 0, i32 2, i32 1)
  %28 = load <8 x i64>, ptr %add.ptr53.i.2, align 1
  store <8 x i64> %28, ptr %add.ptr55.i.2, align 64, !nontemporal !0
  %xor.i.2 = xor <8 x i64> %4, %28
  %shuffle.i.2 = shufflevector <8 x i64> %28, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.2 = add <8 x i64> %shuffle.i.2, %add1.i.1
  %and.i.2 = and <8 x i64> %xor.i.2, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.2 = lshr <8 x i64> %xor.i.2, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.2 = mul <8 x i64> %and.i.2, %shr.i8.2
  %add1.i.2 = add <8 x i64> %add.i7.2, %mul.i9.2
  %add.ptr53.i.3 = getelementptr i8, ptr %add.ptr.i, i64 192
  %add.ptr55.i.3 = getelementptr i8, ptr %add.ptr29.i, i64 192
  %add.ptr57.i.3 = getelementptr i8, ptr %cond40.i, i64 192
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.3, i32 0, i32 2, i32 1)
  %29 = load <8 x i64>, ptr %add.ptr53.i.3, align 1
  store <8 x i64> %29, ptr %add.ptr55.i.3, align 64, !nontemporal !0
  %xor.i.3 = xor <8 x i64> %5, %29
  %shuffle.i.3 = shufflevector <8 x i64> %29, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.3 = add <8 x i64> %shuffle.i.3, %add1.i.2
  %and.i.3 = and <8 x i64> %xor.i.3, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.3 = lshr <8 x i64> %xor.i.3, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.3 = mul <8 x i64> %and.i.3, %shr.i8.3
  %add1.i.3 = add <8 x i64> %add.i7.3, %mul.i9.3
  %add.ptr53.i.4 = getelementptr i8, ptr %add.ptr.i, i64 256
  %add.ptr55.i.4 = getelementptr i8, ptr %add.ptr29.i, i64 256
  %add.ptr57.i.4 = getelementptr i8, ptr %cond40.i, i64 256
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.4, i32 0, i32 2, i32 1)
  %30 = load <8 x i64>, ptr %add.ptr53.i.4, align 1
  store <8 x i64> %30, ptr %add.ptr55.i.4, align 64, !nontemporal !0
  %xor.i.4 = xor <8 x i64> %6, %30
  %shuffle.i.4 = shufflevector <8 x i64> %30, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.4 = add <8 x i64> %shuffle.i.4, %add1.i.3
  %and.i.4 = and <8 x i64> %xor.i.4, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.4 = lshr <8 x i64> %xor.i.4, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.4 = mul <8 x i64> %and.i.4, %shr.i8.4
  %add1.i.4 = add <8 x i64> %add.i7.4, %mul.i9.4
  %add.ptr53.i.5 = getelementptr i8, ptr %add.ptr.i, i64 320
  %add.ptr55.i.5 = getelementptr i8, ptr %add.ptr29.i, i64 320
  %add.ptr57.i.5 = getelementptr i8, ptr %cond40.i, i64 320
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.5, i32 0, i32 2, i32 1)
  %31 = load <8 x i64>, ptr %add.ptr53.i.5, align 1
  store <8 x i64> %31, ptr %add.ptr55.i.5, align 64, !nontemporal !0
  %xor.i.5 = xor <8 x i64> %7, %31
  %shuffle.i.5 = shufflevector <8 x i64> %31, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.5 = add <8 x i64> %shuffle.i.5, %add1.i.4
  %and.i.5 = and <8 x i64> %xor.i.5, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.5 = lshr <8 x i64> %xor.i.5, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.5 = mul <8 x i64> %and.i.5, %shr.i8.5
  %add1.i.5 = add <8 x i64> %add.i7.5, %mul.i9.5
  %add.ptr53.i.6 = getelementptr i8, ptr %add.ptr.i, i64 384
  %add.ptr55.i.6 = getelementptr i8, ptr %add.ptr29.i, i64 384
  %add.ptr57.i.6 = getelementptr i8, ptr %cond40.i, i64 384
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.6, i32 0, i32 2, i32 1)
  %32 = load <8 x i64>, ptr %add.ptr53.i.6, align 1
  store <8 x i64> %32, ptr %add.ptr55.i.6, align 64, !nontemporal !0
  %xor.i.6 = xor <8 x i64> %8, %32
  %shuffle.i.6 = shufflevector <8 x i64> %32, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.6 = add <8 x i64> %shuffle.i.6, %add1.i.5
  %and.i.6 = and <8 x i64> %xor.i.6, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.6 = lshr <8 x i64> %xor.i.6, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.6 = mul <8 x i64> %and.i.6, %shr.i8.6
  %add1.i.6 = add <8 x i64> %add.i7.6, %mul.i9.6
  %add.ptr53.i.7 = getelementptr i8, ptr %add.ptr.i, i64 448
  %add.ptr55.i.7 = getelementptr i8, ptr %add.ptr29.i, i64 448
  %add.ptr57.i.7 = getelementptr i8, ptr %cond40.i, i64 448
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.7, i32 0, i32 2, i32 1)
  %33 = load <8 x i64>, ptr %add.ptr53.i.7, align 1
  store <8 x i64> %33, ptr %add.ptr55.i.7, align 64, !nontemporal !0
  %xor.i.7 = xor <8 x i64> %9, %33
  %shuffle.i.7 = shufflevector <8 x i64> %33, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.7 = add <8 x i64> %shuffle.i.7, %add1.i.6
  %and.i.7 = and <8 x i64> %xor.i.7, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.7 = lshr <8 x i64> %xor.i.7, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.7 = mul <8 x i64> %and.i.7, %shr.i8.7
  %add1.i.7 = add <8 x i64> %add.i7.7, %mul.i9.7
  %add.ptr53.i.8 = getelementptr i8, ptr %add.ptr.i, i64 512
  %add.ptr55.i.8 = getelementptr i8, ptr %add.ptr29.i, i64 512
  %add.ptr57.i.8 = getelementptr i8, ptr %cond40.i, i64 512
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.8, i32 0, i32 2, i32 1)
  %34 = load <8 x i64>, ptr %add.ptr53.i.8, align 1
  store <8 x i64> %34, ptr %add.ptr55.i.8, align 64, !nontemporal !0
  %xor.i.8 = xor <8 x i64> %10, %34
  %shuffle.i.8 = shufflevector <8 x i64> %34, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.8 = add <8 x i64> %shuffle.i.8, %add1.i.7
  %and.i.8 = and <8 x i64> %xor.i.8, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.8 = lshr <8 x i64> %xor.i.8, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.8 = mul <8 x i64> %and.i.8, %shr.i8.8
  %add1.i.8 = add <8 x i64> %add.i7.8, %mul.i9.8
  %add.ptr53.i.9 = getelementptr i8, ptr %add.ptr.i, i64 576
  %add.ptr55.i.9 = getelementptr i8, ptr %add.ptr29.i, i64 576
  %add.ptr57.i.9 = getelementptr i8, ptr %cond40.i, i64 576
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.9, i32 0, i32 2, i32 1)
  %35 = load <8 x i64>, ptr %add.ptr53.i.9, align 1
  store <8 x i64> %35, ptr %add.ptr55.i.9, align 64, !nontemporal !0
  %xor.i.9 = xor <8 x i64> %11, %35
  %shuffle.i.9 = shufflevector <8 x i64> %35, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.9 = add <8 x i64> %shuffle.i.9, %add1.i.8
  %and.i.9 = and <8 x i64> %xor.i.9, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.9 = lshr <8 x i64> %xor.i.9, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.9 = mul <8 x i64> %and.i.9, %shr.i8.9
  %add1.i.9 = add <8 x i64> %add.i7.9, %mul.i9.9
  %add.ptr53.i.10 = getelementptr i8, ptr %add.ptr.i, i64 640
  %add.ptr55.i.10 = getelementptr i8, ptr %add.ptr29.i, i64 640
  %add.ptr57.i.10 = getelementptr i8, ptr %cond40.i, i64 640
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.10, i32 0, i32 2, i32 1)
  %36 = load <8 x i64>, ptr %add.ptr53.i.10, align 1
  store <8 x i64> %36, ptr %add.ptr55.i.10, align 64, !nontemporal !0
  %xor.i.10 = xor <8 x i64> %12, %36
  %shuffle.i.10 = shufflevector <8 x i64> %36, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.10 = add <8 x i64> %shuffle.i.10, %add1.i.9
  %and.i.10 = and <8 x i64> %xor.i.10, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.10 = lshr <8 x i64> %xor.i.10, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.10 = mul <8 x i64> %and.i.10, %shr.i8.10
  %add1.i.10 = add <8 x i64> %add.i7.10, %mul.i9.10
  %add.ptr53.i.11 = getelementptr i8, ptr %add.ptr.i, i64 704
  %add.ptr55.i.11 = getelementptr i8, ptr %add.ptr29.i, i64 704
  %add.ptr57.i.11 = getelementptr i8, ptr %cond40.i, i64 704
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.11, i32 0, i32 2, i32 1)
  %37 = load <8 x i64>, ptr %add.ptr53.i.11, align 1
  store <8 x i64> %37, ptr %add.ptr55.i.11, align 64, !nontemporal !0
  %xor.i.11 = xor <8 x i64> %13, %37
  %shuffle.i.11 = shufflevector <8 x i64> %37, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.11 = add <8 x i64> %shuffle.i.11, %add1.i.10
  %and.i.11 = and <8 x i64> %xor.i.11, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.11 = lshr <8 x i64> %xor.i.11, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.11 = mul <8 x i64> %and.i.11, %shr.i8.11
  %add1.i.11 = add <8 x i64> %add.i7.11, %mul.i9.11
  %add.ptr53.i.12 = getelementptr i8, ptr %add.ptr.i, i64 768
  %add.ptr55.i.12 = getelementptr i8, ptr %add.ptr29.i, i64 768
  %add.ptr57.i.12 = getelementptr i8, ptr %cond40.i, i64 768
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.12, i32 0, i32 2, i32 1)
  %38 = load <8 x i64>, ptr %add.ptr53.i.12, align 1
  store <8 x i64> %38, ptr %add.ptr55.i.12, align 64, !nontemporal !0
  %xor.i.12 = xor <8 x i64> %14, %38
  %shuffle.i.12 = shufflevector <8 x i64> %38, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.12 = add <8 x i64> %shuffle.i.12, %add1.i.11
  %and.i.12 = and <8 x i64> %xor.i.12, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.12 = lshr <8 x i64> %xor.i.12, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.12 = mul <8 x i64> %and.i.12, %shr.i8.12
  %add1.i.12 = add <8 x i64> %add.i7.12, %mul.i9.12
  %add.ptr53.i.13 = getelementptr i8, ptr %add.ptr.i, i64 832
  %add.ptr55.i.13 = getelementptr i8, ptr %add.ptr29.i, i64 832
  %add.ptr57.i.13 = getelementptr i8, ptr %cond40.i, i64 832
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.13, i32 0, i32 2, i32 1)
  %39 = load <8 x i64>, ptr %add.ptr53.i.13, align 1
  store <8 x i64> %39, ptr %add.ptr55.i.13, align 64, !nontemporal !0
  %xor.i.13 = xor <8 x i64> %15, %39
  %shuffle.i.13 = shufflevector <8 x i64> %39, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.13 = add <8 x i64> %shuffle.i.13, %add1.i.12
  %and.i.13 = and <8 x i64> %xor.i.13, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.13 = lshr <8 x i64> %xor.i.13, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.13 = mul <8 x i64> %and.i.13, %shr.i8.13
  %add1.i.13 = add <8 x i64> %add.i7.13, %mul.i9.13
  %add.ptr53.i.14 = getelementptr i8, ptr %add.ptr.i, i64 896
  %add.ptr55.i.14 = getelementptr i8, ptr %add.ptr29.i, i64 896
  %add.ptr57.i.14 = getelementptr i8, ptr %cond40.i, i64 896
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.14, i32 0, i32 2, i32 1)
  %40 = load <8 x i64>, ptr %add.ptr53.i.14, align 1
  store <8 x i64> %40, ptr %add.ptr55.i.14, align 64, !nontemporal !0
  %xor.i.14 = xor <8 x i64> %16, %40
  %shuffle.i.14 = shufflevector <8 x i64> %40, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.14 = add <8 x i64> %shuffle.i.14, %add1.i.13
  %and.i.14 = and <8 x i64> %xor.i.14, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.14 = lshr <8 x i64> %xor.i.14, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.14 = mul <8 x i64> %and.i.14, %shr.i8.14
  %add1.i.14 = add <8 x i64> %add.i7.14, %mul.i9.14
  %add.ptr53.i.15 = getelementptr i8, ptr %add.ptr.i, i64 960
  %add.ptr55.i.15 = getelementptr i8, ptr %add.ptr29.i, i64 960
  %add.ptr57.i.15 = getelementptr i8, ptr %cond40.i, i64 960
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.15, i32 0, i32 2, i32 1)
  %41 = load <8 x i64>, ptr %add.ptr53.i.15, align 1
  store <8 x i64> %41, ptr %add.ptr55.i.15, align 64, !nontemporal !0
  %xor.i.15 = xor <8 x i64> %17, %41
  %shuffle.i.15 = shufflevector <8 x i64> %41, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i7.15 = add <8 x i64> %shuffle.i.15, %add1.i.14
  %and.i.15 = and <8 x i64> %xor.i.15, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i8.15 = lshr <8 x i64> %xor.i.15, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i9.15 = mul <8 x i64> %and.i.15, %shr.i8.15
  %add1.i.15 = add <8 x i64> %add.i7.15, %mul.i9.15
  %shr.i = lshr <8 x i64> %add1.i.15, <i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47>
  %42 = xor <8 x i64> %shr.i, %add1.i.15
  %xor1.i = xor <8 x i64> %42, %0
  %mul.i5 = mul <8 x i64> %xor1.i, <i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761>
  br label %if.end93.i

if.else.i:
  tail call void @llvm.prefetch.p0(ptr %cond40.i, i32 0, i32 2, i32 1)
  %43 = load <8 x i64>, ptr %add.ptr.i, align 1
  store <8 x i64> %43, ptr %add.ptr29.i, align 64, !nontemporal !0
  %cmp75.i = icmp eq i64 %left.1.i31, 1
  %mul78.i = shl i64 %rem.i, 3
  %cond80.i = select i1 %cmp75.i, i64 121, i64 %mul78.i
  %add.ptr81.i = getelementptr i8, ptr @SECRET, i64 %cond80.i
  %44 = load <8 x i64>, ptr %add.ptr81.i, align 1
  %xor.i12 = xor <8 x i64> %44, %43
  %shuffle.i13 = shufflevector <8 x i64> %43, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i14 = add <8 x i64> %shuffle.i13, %sums.1.i32
  %and.i15 = and <8 x i64> %xor.i12, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i16 = lshr <8 x i64> %xor.i12, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i17 = mul <8 x i64> %and.i15, %shr.i16
  %add1.i18 = add <8 x i64> %add.i14, %mul.i17
  %cmp85.i = icmp eq i64 %rem.i, 15
  %cmp87.i = icmp ugt i64 %left.1.i31, 1
  %or.cond118.i = select i1 %cmp85.i, i1 %cmp87.i, i1 false
  br i1 %or.cond118.i, label %if.then88.i, label %if.end93.i

if.then88.i:
  %shr.i20 = lshr <8 x i64> %add1.i18, <i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47>
  %45 = xor <8 x i64> %shr.i20, %add1.i18
  %xor1.i21 = xor <8 x i64> %45, %0
  %mul.i22 = mul <8 x i64> %xor1.i21, <i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761>
  br label %if.end93.i

if.end93.i:
  %.sink49 = phi i64 [ 16, %for.body51.i.preheader ], [ 1, %if.then88.i ], [ 1, %if.else.i ]
  %.sink = phi i64 [ -16, %for.body51.i.preheader ], [ -1, %if.then88.i ], [ -1, %if.else.i ]
  %sums.6.i = phi <8 x i64> [ %mul.i5, %for.body51.i.preheader ], [ %mul.i22, %if.then88.i ], [ %add1.i18, %if.else.i ]
  %inc92.i = add i64 %i.0.i30, %.sink49
  %dec.i = add i64 %left.1.i31, %.sink
  %cmp24.i = icmp ult i64 %inc92.i, %div180.i
  br i1 %cmp24.i, label %for.body26.i, label %for.cond.cleanup25.i

if.then103.i:
  store <8 x i64> %sums.0.i.lcssa, ptr %arrayidx.i, align 8
  store i64 %left.0.i.lcssa, ptr %left2.i, align 8
  %cmp107.i = icmp eq i64 %left.0.i.lcssa, 0
  br i1 %cmp107.i, label %if.then108.i, label %if.end114.i

if.then108.i:
  %xor.i24 = xor <8 x i64> %1, %sums.0.i.lcssa
  %mul.i25 = mul i64 %20, -8224016703601598016
  %vecext.i = extractelement <8 x i64> %xor.i24, i64 0
  %conv.i = zext i64 %vecext.i to i128
  %vecext1.i = extractelement <8 x i64> %xor.i24, i64 1
  %conv2.i = zext i64 %vecext1.i to i128
  %mul3.i = mul i128 %conv2.i, %conv.i
  %shr.i26 = lshr i128 %mul3.i, 64
  %xor616.i = xor i128 %shr.i26, %mul3.i
  %xor6.i = trunc i128 %xor616.i to i64
  %add7.i = add i64 %mul.i25, %xor6.i
  %vecext.1.i = extractelement <8 x i64> %xor.i24, i64 2
  %conv.1.i = zext i64 %vecext.1.i to i128
  %vecext1.1.i = extractelement <8 x i64> %xor.i24, i64 3
  %conv2.1.i = zext i64 %vecext1.1.i to i128
  %mul3.1.i = mul i128 %conv2.1.i, %conv.1.i
  %shr.1.i = lshr i128 %mul3.1.i, 64
  %xor616.1.i = xor i128 %shr.1.i, %mul3.1.i
  %xor6.1.i = trunc i128 %xor616.1.i to i64
  %add7.1.i = add i64 %add7.i, %xor6.1.i
  %vecext.2.i = extractelement <8 x i64> %xor.i24, i64 4
  %conv.2.i = zext i64 %vecext.2.i to i128
  %vecext1.2.i = extractelement <8 x i64> %xor.i24, i64 5
  %conv2.2.i = zext i64 %vecext1.2.i to i128
  %mul3.2.i = mul i128 %conv2.2.i, %conv.2.i
  %shr.2.i = lshr i128 %mul3.2.i, 64
  %xor616.2.i = xor i128 %shr.2.i, %mul3.2.i
  %xor6.2.i = trunc i128 %xor616.2.i to i64
  %add7.2.i = add i64 %add7.1.i, %xor6.2.i
  %vecext.3.i = extractelement <8 x i64> %xor.i24, i64 6
  %conv.3.i = zext i64 %vecext.3.i to i128
  %vecext1.3.i = extractelement <8 x i64> %xor.i24, i64 7
  %conv2.3.i = zext i64 %vecext1.3.i to i128
  %mul3.3.i = mul i128 %conv2.3.i, %conv.3.i
  %shr.3.i = lshr i128 %mul3.3.i, 64
  %xor616.3.i = xor i128 %shr.3.i, %mul3.3.i
  %xor6.3.i = trunc i128 %xor616.3.i to i64
  %add7.3.i = add i64 %add7.2.i, %xor6.3.i
  %shr.i.i = lshr i64 %add7.3.i, 37
  %xor.i.i = xor i64 %shr.i.i, %add7.3.i
  %mul.i.i = mul i64 %xor.i.i, 1609587791953885689
  %shr1.i.i = lshr i64 %mul.i.i, 32
  %xor2.i.i = xor i64 %shr1.i.i, %mul.i.i
  store i64 %xor2.i.i, ptr %total3.i, align 8
  br label %if.end114.i

if.end114.i:
  %inc116.i = add i64 %slot.0.i43, 1
  %exitcond48.not = icmp eq i64 %inc116.i, %slots
  br i1 %exitcond48.not, label %run.exit, label %for.body.i

run.exit:
  fence seq_cst
  ret void
}

define void @hash(ptr %sources, ptr %lengths, i64 %slots, i64 %rows, ptr %states) {
entry:
  %cmp.i40.not = icmp eq i64 %slots, 0
  br i1 %cmp.i40.not, label %run.exit, label %for.body.i.lr.ph

for.body.i.lr.ph:
  %cmp5.i32.not = icmp eq i64 %rows, 0
  %mul.i = mul i64 %rows, %slots
  %0 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 128), align 64
  %1 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 11), align 1
  %2 = load <8 x i64>, ptr @SECRET, align 64
  %3 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 8), align 8
  %4 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 16), align 16
  %5 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 24), align 8
  %6 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 32), align 32
  %7 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 40), align 8
  %8 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 48), align 16
  %9 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 56), align 8
  %10 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 64), align 64
  %11 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 72), align 8
  %12 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 80), align 16
  %13 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 88), align 8
  %14 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 96), align 32
  %15 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 104), align 8
  %16 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 112), align 16
  %17 = load <8 x i64>, ptr getelementptr (i8, ptr @SECRET, i64 120), align 8
  br label %for.body.i

for.body.i:
  %row.0.i42 = phi i64 [ 0, %for.body.i.lr.ph ], [ %row.1.i.lcssa, %if.end114.i ]
  %slot.0.i41 = phi i64 [ 0, %for.body.i.lr.ph ], [ %inc116.i, %if.end114.i ]
  %arrayidx.i = getelementptr %struct.state, ptr %states, i64 %slot.0.i41
  %18 = load <8 x i64>, ptr %arrayidx.i, align 1
  %left2.i = getelementptr i8, ptr %arrayidx.i, i64 64
  %19 = load i64, ptr %left2.i, align 8
  %total3.i = getelementptr i8, ptr %arrayidx.i, i64 72
  %20 = load i64, ptr %total3.i, align 8
  br i1 %cmp5.i32.not, label %for.cond.cleanup6.i, label %for.body7.i

for.cond.cleanup6.i:
  %left.0.i.lcssa = phi i64 [ %19, %for.body.i ], [ %left.1.i.lcssa, %for.cond.cleanup25.i ]
  %sums.0.i.lcssa = phi <8 x i64> [ %18, %for.body.i ], [ %sums.1.i.lcssa, %for.cond.cleanup25.i ]
  %row.1.i.lcssa = phi i64 [ %row.0.i42, %for.body.i ], [ %add.i, %for.cond.cleanup25.i ]
  %cmp102.not.i = icmp eq i64 %19, 0
  br i1 %cmp102.not.i, label %if.end114.i, label %if.then103.i

for.body7.i:
  %row.1.i36 = phi i64 [ %add.i, %for.cond.cleanup25.i ], [ %row.0.i42, %for.body.i ]
  %sums.0.i35 = phi <8 x i64> [ %sums.1.i.lcssa, %for.cond.cleanup25.i ], [ %18, %for.body.i ]
  %left.0.i34 = phi i64 [ %left.1.i.lcssa, %for.cond.cleanup25.i ], [ %19, %for.body.i ]
  %j.0.i33 = phi i64 [ %inc96.i, %for.cond.cleanup25.i ], [ 0, %for.body.i ]
  %arrayidx8.i = getelementptr ptr, ptr %sources, i64 %row.1.i36
  %21 = load ptr, ptr %arrayidx8.i, align 8
  %add.i = add i64 %row.1.i36, 1
  %cmp9.i = icmp ult i64 %add.i, %mul.i
  %cond.i = select i1 %cmp9.i, i64 %add.i, i64 %row.1.i36
  %arrayidx11.i = getelementptr ptr, ptr %sources, i64 %cond.i
  %22 = load ptr, ptr %arrayidx11.i, align 8
  %arrayidx17.i = getelementptr i64, ptr %lengths, i64 %j.0.i33
  %23 = load i64, ptr %arrayidx17.i, align 8
  %div180.i = lshr i64 %23, 6
  %cond22.i = tail call i64 @llvm.umin.i64(i64 %div180.i, i64 128)
  %cmp24.i27.not = icmp ult i64 %23, 64
  br i1 %cmp24.i27.not, label %for.cond.cleanup25.i, label %for.body26.i.lr.ph

for.body26.i.lr.ph:
  %mul33.i = shl i64 %cond22.i, 6
  br label %for.body26.i

for.cond.cleanup25.i:
  %left.1.i.lcssa = phi i64 [ %left.0.i34, %for.body7.i ], [ %dec.i, %if.end93.i ]
  %sums.1.i.lcssa = phi <8 x i64> [ %sums.0.i35, %for.body7.i ], [ %sums.6.i, %if.end93.i ]
  %inc96.i = add i64 %j.0.i33, 1
  %exitcond.not = icmp eq i64 %inc96.i, %rows
  br i1 %exitcond.not, label %for.cond.cleanup6.i, label %for.body7.i

for.body26.i:
  %sums.1.i30 = phi <8 x i64> [ %sums.0.i35, %for.body26.i.lr.ph ], [ %sums.6.i, %if.end93.i ]
  %left.1.i29 = phi i64 [ %left.0.i34, %for.body26.i.lr.ph ], [ %dec.i, %if.end93.i ]
  %i.0.i28 = phi i64 [ 0, %for.body26.i.lr.ph ], [ %inc92.i, %if.end93.i ]
  %mul27.i = shl i64 %i.0.i28, 6
  %add.ptr.i = getelementptr i8, ptr %21, i64 %mul27.i
  %add30.i = add i64 %i.0.i28, %cond22.i
  %cmp31.i = icmp ult i64 %add30.i, %div180.i
  %add.ptr34.i = getelementptr i8, ptr %add.ptr.i, i64 %mul33.i
  %sub.i = sub i64 %add30.i, %div180.i
  %mul37.i = shl i64 %sub.i, 6
  %add.ptr38.i = getelementptr i8, ptr %22, i64 %mul37.i
  %cond40.i = select i1 %cmp31.i, ptr %add.ptr34.i, ptr %add.ptr38.i
  %sub41.i = sub i64 %20, %left.1.i29
  %rem.i = and i64 %sub41.i, 15
  %sub42.i = sub i64 %div180.i, %i.0.i28
  %cmp43.i = icmp ugt i64 %sub42.i, 15
  br i1 %cmp43.i, label %land.lhs.true.i, label %if.else.i

land.lhs.true.i:
  %cmp45.i = icmp eq i64 %rem.i, 0
  %cmp47.i = icmp ugt i64 %left.1.i29, 16
  %or.cond.i = select i1 %cmp45.i, i1 %cmp47.i, i1 false
  br i1 %or.cond.i, label %for.body51.i.preheader, label %if.else.i

for.body51.i.preheader:
  tail call void @llvm.prefetch.p0(ptr %cond40.i, i32 0, i32 2, i32 1)
  %24 = load <8 x i64>, ptr %add.ptr.i, align 1
  %xor.i = xor <8 x i64> %2, %24
  %shuffle.i = shufflevector <8 x i64> %24, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5 = add <8 x i64> %shuffle.i, %sums.1.i30
  %and.i = and <8 x i64> %xor.i, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6 = lshr <8 x i64> %xor.i, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7 = mul <8 x i64> %and.i, %shr.i6
  %add1.i = add <8 x i64> %add.i5, %mul.i7
  %add.ptr53.i.1 = getelementptr i8, ptr %add.ptr.i, i64 64
  %add.ptr57.i.1 = getelementptr i8, ptr %cond40.i, i64 64
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.1, i32 0, i32 2, i32 1)
  %25 = load <8 x i64>, ptr %add.ptr53.i.1, align 1
  %xor.i.1 = xor <8 x i64> %3, %25
  %shuffle.i.1 = shufflevector <8 x i64> %25, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.1 = add <8 x i64> %shuffle.i.1, %add1.i
  %and.i.1 = and <8 x i64> %xor.i.1, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.1 = lshr <8 x i64> %xor.i.1, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.1 = mul <8 x i64> %and.i.1, %shr.i6.1
  %add1.i.1 = add <8 x i64> %add.i5.1, %mul.i7.1
  %add.ptr53.i.2 = getelementptr i8, ptr %add.ptr.i, i64 128
  %add.ptr57.i.2 = getelementptr i8, ptr %cond40.i, i64 128
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.2, i32 0, i32 2, i32 1)
  %26 = load <8 x i64>, ptr %add.ptr53.i.2, align 1
  %xor.i.2 = xor <8 x i64> %4, %26
  %shuffle.i.2 = shufflevector <8 x i64> %26, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.2 = add <8 x i64> %shuffle.i.2, %add1.i.1
  %and.i.2 = and <8 x i64> %xor.i.2, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.2 = lshr <8 x i64> %xor.i.2, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.2 = mul <8 x i64> %and.i.2, %shr.i6.2
  %add1.i.2 = add <8 x i64> %add.i5.2, %mul.i7.2
  %add.ptr53.i.3 = getelementptr i8, ptr %add.ptr.i, i64 192
  %add.ptr57.i.3 = getelementptr i8, ptr %cond40.i, i64 192
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.3, i32 0, i32 2, i32 1)
  %27 = load <8 x i64>, ptr %add.ptr53.i.3, align 1
  %xor.i.3 = xor <8 x i64> %5, %27
  %shuffle.i.3 = shufflevector <8 x i64> %27, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.3 = add <8 x i64> %shuffle.i.3, %add1.i.2
  %and.i.3 = and <8 x i64> %xor.i.3, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.3 = lshr <8 x i64> %xor.i.3, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.3 = mul <8 x i64> %and.i.3, %shr.i6.3
  %add1.i.3 = add <8 x i64> %add.i5.3, %mul.i7.3
  %add.ptr53.i.4 = getelementptr i8, ptr %add.ptr.i, i64 256
  %add.ptr57.i.4 = getelementptr i8, ptr %cond40.i, i64 256
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.4, i32 0, i32 2, i32 1)
  %28 = load <8 x i64>, ptr %add.ptr53.i.4, align 1
  %xor.i.4 = xor <8 x i64> %6, %28
  %shuffle.i.4 = shufflevector <8 x i64> %28, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.4 = add <8 x i64> %shuffle.i.4, %add1.i.3
  %and.i.4 = and <8 x i64> %xor.i.4, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.4 = lshr <8 x i64> %xor.i.4, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.4 = mul <8 x i64> %and.i.4, %shr.i6.4
  %add1.i.4 = add <8 x i64> %add.i5.4, %mul.i7.4
  %add.ptr53.i.5 = getelementptr i8, ptr %add.ptr.i, i64 320
  %add.ptr57.i.5 = getelementptr i8, ptr %cond40.i, i64 320
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.5, i32 0, i32 2, i32 1)
  %29 = load <8 x i64>, ptr %add.ptr53.i.5, align 1
  %xor.i.5 = xor <8 x i64> %7, %29
  %shuffle.i.5 = shufflevector <8 x i64> %29, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.5 = add <8 x i64> %shuffle.i.5, %add1.i.4
  %and.i.5 = and <8 x i64> %xor.i.5, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.5 = lshr <8 x i64> %xor.i.5, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.5 = mul <8 x i64> %and.i.5, %shr.i6.5
  %add1.i.5 = add <8 x i64> %add.i5.5, %mul.i7.5
  %add.ptr53.i.6 = getelementptr i8, ptr %add.ptr.i, i64 384
  %add.ptr57.i.6 = getelementptr i8, ptr %cond40.i, i64 384
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.6, i32 0, i32 2, i32 1)
  %30 = load <8 x i64>, ptr %add.ptr53.i.6, align 1
  %xor.i.6 = xor <8 x i64> %8, %30
  %shuffle.i.6 = shufflevector <8 x i64> %30, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.6 = add <8 x i64> %shuffle.i.6, %add1.i.5
  %and.i.6 = and <8 x i64> %xor.i.6, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.6 = lshr <8 x i64> %xor.i.6, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.6 = mul <8 x i64> %and.i.6, %shr.i6.6
  %add1.i.6 = add <8 x i64> %add.i5.6, %mul.i7.6
  %add.ptr53.i.7 = getelementptr i8, ptr %add.ptr.i, i64 448
  %add.ptr57.i.7 = getelementptr i8, ptr %cond40.i, i64 448
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.7, i32 0, i32 2, i32 1)
  %31 = load <8 x i64>, ptr %add.ptr53.i.7, align 1
  %xor.i.7 = xor <8 x i64> %9, %31
  %shuffle.i.7 = shufflevector <8 x i64> %31, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.7 = add <8 x i64> %shuffle.i.7, %add1.i.6
  %and.i.7 = and <8 x i64> %xor.i.7, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.7 = lshr <8 x i64> %xor.i.7, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.7 = mul <8 x i64> %and.i.7, %shr.i6.7
  %add1.i.7 = add <8 x i64> %add.i5.7, %mul.i7.7
  %add.ptr53.i.8 = getelementptr i8, ptr %add.ptr.i, i64 512
  %add.ptr57.i.8 = getelementptr i8, ptr %cond40.i, i64 512
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.8, i32 0, i32 2, i32 1)
  %32 = load <8 x i64>, ptr %add.ptr53.i.8, align 1
  %xor.i.8 = xor <8 x i64> %10, %32
  %shuffle.i.8 = shufflevector <8 x i64> %32, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.8 = add <8 x i64> %shuffle.i.8, %add1.i.7
  %and.i.8 = and <8 x i64> %xor.i.8, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.8 = lshr <8 x i64> %xor.i.8, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.8 = mul <8 x i64> %and.i.8, %shr.i6.8
  %add1.i.8 = add <8 x i64> %add.i5.8, %mul.i7.8
  %add.ptr53.i.9 = getelementptr i8, ptr %add.ptr.i, i64 576
  %add.ptr57.i.9 = getelementptr i8, ptr %cond40.i, i64 576
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.9, i32 0, i32 2, i32 1)
  %33 = load <8 x i64>, ptr %add.ptr53.i.9, align 1
  %xor.i.9 = xor <8 x i64> %11, %33
  %shuffle.i.9 = shufflevector <8 x i64> %33, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.9 = add <8 x i64> %shuffle.i.9, %add1.i.8
  %and.i.9 = and <8 x i64> %xor.i.9, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.9 = lshr <8 x i64> %xor.i.9, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.9 = mul <8 x i64> %and.i.9, %shr.i6.9
  %add1.i.9 = add <8 x i64> %add.i5.9, %mul.i7.9
  %add.ptr53.i.10 = getelementptr i8, ptr %add.ptr.i, i64 640
  %add.ptr57.i.10 = getelementptr i8, ptr %cond40.i, i64 640
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.10, i32 0, i32 2, i32 1)
  %34 = load <8 x i64>, ptr %add.ptr53.i.10, align 1
  %xor.i.10 = xor <8 x i64> %12, %34
  %shuffle.i.10 = shufflevector <8 x i64> %34, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.10 = add <8 x i64> %shuffle.i.10, %add1.i.9
  %and.i.10 = and <8 x i64> %xor.i.10, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.10 = lshr <8 x i64> %xor.i.10, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.10 = mul <8 x i64> %and.i.10, %shr.i6.10
  %add1.i.10 = add <8 x i64> %add.i5.10, %mul.i7.10
  %add.ptr53.i.11 = getelementptr i8, ptr %add.ptr.i, i64 704
  %add.ptr57.i.11 = getelementptr i8, ptr %cond40.i, i64 704
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.11, i32 0, i32 2, i32 1)
  %35 = load <8 x i64>, ptr %add.ptr53.i.11, align 1
  %xor.i.11 = xor <8 x i64> %13, %35
  %shuffle.i.11 = shufflevector <8 x i64> %35, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.11 = add <8 x i64> %shuffle.i.11, %add1.i.10
  %and.i.11 = and <8 x i64> %xor.i.11, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.11 = lshr <8 x i64> %xor.i.11, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.11 = mul <8 x i64> %and.i.11, %shr.i6.11
  %add1.i.11 = add <8 x i64> %add.i5.11, %mul.i7.11
  %add.ptr53.i.12 = getelementptr i8, ptr %add.ptr.i, i64 768
  %add.ptr57.i.12 = getelementptr i8, ptr %cond40.i, i64 768
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.12, i32 0, i32 2, i32 1)
  %36 = load <8 x i64>, ptr %add.ptr53.i.12, align 1
  %xor.i.12 = xor <8 x i64> %14, %36
  %shuffle.i.12 = shufflevector <8 x i64> %36, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.12 = add <8 x i64> %shuffle.i.12, %add1.i.11
  %and.i.12 = and <8 x i64> %xor.i.12, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.12 = lshr <8 x i64> %xor.i.12, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.12 = mul <8 x i64> %and.i.12, %shr.i6.12
  %add1.i.12 = add <8 x i64> %add.i5.12, %mul.i7.12
  %add.ptr53.i.13 = getelementptr i8, ptr %add.ptr.i, i64 832
  %add.ptr57.i.13 = getelementptr i8, ptr %cond40.i, i64 832
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.13, i32 0, i32 2, i32 1)
  %37 = load <8 x i64>, ptr %add.ptr53.i.13, align 1
  %xor.i.13 = xor <8 x i64> %15, %37
  %shuffle.i.13 = shufflevector <8 x i64> %37, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.13 = add <8 x i64> %shuffle.i.13, %add1.i.12
  %and.i.13 = and <8 x i64> %xor.i.13, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.13 = lshr <8 x i64> %xor.i.13, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.13 = mul <8 x i64> %and.i.13, %shr.i6.13
  %add1.i.13 = add <8 x i64> %add.i5.13, %mul.i7.13
  %add.ptr53.i.14 = getelementptr i8, ptr %add.ptr.i, i64 896
  %add.ptr57.i.14 = getelementptr i8, ptr %cond40.i, i64 896
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.14, i32 0, i32 2, i32 1)
  %38 = load <8 x i64>, ptr %add.ptr53.i.14, align 1
  %xor.i.14 = xor <8 x i64> %16, %38
  %shuffle.i.14 = shufflevector <8 x i64> %38, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.14 = add <8 x i64> %shuffle.i.14, %add1.i.13
  %and.i.14 = and <8 x i64> %xor.i.14, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.14 = lshr <8 x i64> %xor.i.14, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.14 = mul <8 x i64> %and.i.14, %shr.i6.14
  %add1.i.14 = add <8 x i64> %add.i5.14, %mul.i7.14
  %add.ptr53.i.15 = getelementptr i8, ptr %add.ptr.i, i64 960
  %add.ptr57.i.15 = getelementptr i8, ptr %cond40.i, i64 960
  tail call void @llvm.prefetch.p0(ptr %add.ptr57.i.15, i32 0, i32 2, i32 1)
  %39 = load <8 x i64>, ptr %add.ptr53.i.15, align 1
  %xor.i.15 = xor <8 x i64> %17, %39
  %shuffle.i.15 = shufflevector <8 x i64> %39, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i5.15 = add <8 x i64> %shuffle.i.15, %add1.i.14
  %and.i.15 = and <8 x i64> %xor.i.15, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i6.15 = lshr <8 x i64> %xor.i.15, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i7.15 = mul <8 x i64> %and.i.15, %shr.i6.15
  %add1.i.15 = add <8 x i64> %add.i5.15, %mul.i7.15
  %shr.i = lshr <8 x i64> %add1.i.15, <i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47>
  %40 = xor <8 x i64> %shr.i, %add1.i.15
  %xor1.i = xor <8 x i64> %40, %0
  %mul.i3 = mul <8 x i64> %xor1.i, <i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761>
  br label %if.end93.i

if.else.i:
  tail call void @llvm.prefetch.p0(ptr %cond40.i, i32 0, i32 2, i32 1)
  %41 = load <8 x i64>, ptr %add.ptr.i, align 1
  %cmp75.i = icmp eq i64 %left.1.i29, 1
  %mul78.i = shl i64 %rem.i, 3
  %cond80.i = select i1 %cmp75.i, i64 121, i64 %mul78.i
  %add.ptr81.i = getelementptr i8, ptr @SECRET, i64 %cond80.i
  %42 = load <8 x i64>, ptr %add.ptr81.i, align 1
  %xor.i10 = xor <8 x i64> %42, %41
  %shuffle.i11 = shufflevector <8 x i64> %41, <8 x i64> poison, <8 x i32> <i32 1, i32 0, i32 3, i32 2, i32 5, i32 4, i32 7, i32 6>
  %add.i12 = add <8 x i64> %shuffle.i11, %sums.1.i30
  %and.i13 = and <8 x i64> %xor.i10, <i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295, i64 4294967295>
  %shr.i14 = lshr <8 x i64> %xor.i10, <i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32, i64 32>
  %mul.i15 = mul <8 x i64> %and.i13, %shr.i14
  %add1.i16 = add <8 x i64> %add.i12, %mul.i15
  %cmp85.i = icmp eq i64 %rem.i, 15
  %cmp87.i = icmp ugt i64 %left.1.i29, 1
  %or.cond118.i = select i1 %cmp85.i, i1 %cmp87.i, i1 false
  br i1 %or.cond118.i, label %if.then88.i, label %if.end93.i

if.then88.i:
  %shr.i18 = lshr <8 x i64> %add1.i16, <i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47, i64 47>
  %43 = xor <8 x i64> %shr.i18, %add1.i16
  %xor1.i19 = xor <8 x i64> %43, %0
  %mul.i20 = mul <8 x i64> %xor1.i19, <i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761, i64 2654435761>
  br label %if.end93.i

if.end93.i:
  %.sink47 = phi i64 [ 16, %for.body51.i.preheader ], [ 1, %if.then88.i ], [ 1, %if.else.i ]
  %.sink = phi i64 [ -16, %for.body51.i.preheader ], [ -1, %if.then88.i ], [ -1, %if.else.i ]
  %sums.6.i = phi <8 x i64> [ %mul.i3, %for.body51.i.preheader ], [ %mul.i20, %if.then88.i ], [ %add1.i16, %if.else.i ]
  %inc92.i = add i64 %i.0.i28, %.sink47
  %dec.i = add i64 %left.1.i29, %.sink
  %cmp24.i = icmp ult i64 %inc92.i, %div180.i
  br i1 %cmp24.i, label %for.body26.i, label %for.cond.cleanup25.i

if.then103.i:
  store <8 x i64> %sums.0.i.lcssa, ptr %arrayidx.i, align 8
  store i64 %left.0.i.lcssa, ptr %left2.i, align 8
  %cmp107.i = icmp eq i64 %left.0.i.lcssa, 0
  br i1 %cmp107.i, label %if.then108.i, label %if.end114.i

if.then108.i:
  %xor.i22 = xor <8 x i64> %1, %sums.0.i.lcssa
  %mul.i23 = mul i64 %20, -8224016703601598016
  %vecext.i = extractelement <8 x i64> %xor.i22, i64 0
  %conv.i = zext i64 %vecext.i to i128
  %vecext1.i = extractelement <8 x i64> %xor.i22, i64 1
  %conv2.i = zext i64 %vecext1.i to i128
  %mul3.i = mul i128 %conv2.i, %conv.i
  %shr.i24 = lshr i128 %mul3.i, 64
  %xor616.i = xor i128 %shr.i24, %mul3.i
  %xor6.i = trunc i128 %xor616.i to i64
  %add7.i = add i64 %mul.i23, %xor6.i
  %vecext.1.i = extractelement <8 x i64> %xor.i22, i64 2
  %conv.1.i = zext i64 %vecext.1.i to i128
  %vecext1.1.i = extractelement <8 x i64> %xor.i22, i64 3
  %conv2.1.i = zext i64 %vecext1.1.i to i128
  %mul3.1.i = mul i128 %conv2.1.i, %conv.1.i
  %shr.1.i = lshr i128 %mul3.1.i, 64
  %xor616.1.i = xor i128 %shr.1.i, %mul3.1.i
  %xor6.1.i = trunc i128 %xor616.1.i to i64
  %add7.1.i = add i64 %add7.i, %xor6.1.i
  %vecext.2.i = extractelement <8 x i64> %xor.i22, i64 4
  %conv.2.i = zext i64 %vecext.2.i to i128
  %vecext1.2.i = extractelement <8 x i64> %xor.i22, i64 5
  %conv2.2.i = zext i64 %vecext1.2.i to i128
  %mul3.2.i = mul i128 %conv2.2.i, %conv.2.i
  %shr.2.i = lshr i128 %mul3.2.i, 64
  %xor616.2.i = xor i128 %shr.2.i, %mul3.2.i
  %xor6.2.i = trunc i128 %xor616.2.i to i64
  %add7.2.i = add i64 %add7.1.i, %xor6.2.i
  %vecext.3.i = extractelement <8 x i64> %xor.i22, i64 6
  %conv.3.i = zext i64 %vecext.3.i to i128
  %vecext1.3.i = extractelement <8 x i64> %xor.i22, i64 7
  %conv2.3.i = zext i64 %vecext1.3.i to i128
  %mul3.3.i = mul i128 %conv2.3.i, %conv.3.i
  %shr.3.i = lshr i128 %mul3.3.i, 64
  %xor616.3.i = xor i128 %shr.3.i, %mul3.3.i
  %xor6.3.i = trunc i128 %xor616.3.i to i64
  %add7.3.i = add i64 %add7.2.i, %xor6.3.i
  %shr.i.i = lshr i64 %add7.3.i, 37
  %xor.i.i = xor i64 %shr.i.i, %add7.3.i
  %mul.i.i = mul i64 %xor.i.i, 1609587791953885689
  %shr1.i.i = lshr i64 %mul.i.i, 32
  %xor2.i.i = xor i64 %shr1.i.i, %mul.i.i
  store i64 %xor2.i.i, ptr %total3.i, align 8
  br label %if.end114.i

if.end114.i:
  %inc116.i = add i64 %slot.0.i41, 1
  %exitcond46.not = icmp eq i64 %inc116.i, %slots
  br i1 %exitcond46.not, label %run.exit, label %for.body.i

run.exit:
  fence seq_cst
  ret void
}

declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

declare i64 @llvm.umin.i64(i64, i64)


!0 = !{i32 1}
